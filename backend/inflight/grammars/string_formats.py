"""`format` of JSON Schema, where llguidance's own expression admits texts that do not exist."""

from __future__ import annotations

from typing import Any

__all__ = ["STRING_FORMATS"]

# Every year but 0000, which Python's `datetime` does not have; 29 February in leap years alone.
_DATE = (
    r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
# No second 60: a leap second exists at the end of some months, and few readers know it.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# Up to 63 letters, digits and hyphens.  Labels whose third and fourth characters are hyphens are reserved (RFC 5890);
# no expression can tell whether one is Punycode.
_X, _Y = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_LABEL = f"{_X}(?:{_Y}{{0,2}}{_X}|{_Y}(?:{_X}{_Y}|-{_X}){_Y}{{0,58}}{_X})?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[(?:{_BYTE}\.){{3}}{_BYTE}\])"

# Name of the format -> keywords that say the same.  RFC 3339 (date and time), RFC 1123 (hostname), RFC 5321 (email).
STRING_FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^(?:{_DATE})$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^(?:{_DATE})[tT]{_TIME}$"},
    "hostname": {"pattern": f"^{_HOSTNAME}$", "maxLength": 253},
    "email": {"pattern": f"^{_EMAIL}$", "maxLength": 254},
}
