"""The messages of an engine that reads the host memory of another one.  No torch.

    reader                          server
                              <--   Challenge{version, nonce, is_full}
    Hello{namespace, nonce, proof}  -->
                              <--   Welcome{is_same, is_full, proof}
    Find{keys}                -->                                 or FirstOf{keys}
                              <--   Position{index}
    Load{key}                 -->
                              <--   Extent{size}, then so many bytes: seal and blocks; 0: it does not have it

is_full: too many are connected, and the server hangs up.  is_same: both have KV of one namespace.
A message is its length, 4 bytes with the highest first, and a MessagePack array.  Each question has one answer.
Both sides prove that they know the secret (HMAC-SHA-256 of both nonces), so a process without it can neither ask nor
answer, unless it can change what is on its way.  Nothing is encrypted.  Extents have seals, which
are keyed with the same secret.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = [
    "LENGTH_BYTES",
    "MOST_ANSWER_BYTES",
    "MOST_GREETING_BYTES",
    "MOST_KEYS",
    "MOST_QUESTION_BYTES",
    "NONCE_BYTES",
    "VERSION",
    "Challenge",
    "Extent",
    "Find",
    "FirstOf",
    "Hello",
    "Load",
    "Position",
    "Question",
    "Welcome",
    "decoded",
    "encoded",
    "proof",
    "seconds_for",
]

VERSION = 1
NONCE_BYTES = 16
LENGTH_BYTES = 4
MOST_KEYS = 4096  # of a question: a context of a million tokens
MOST_GREETING_BYTES = 256
MOST_ANSWER_BYTES = 256
MOST_QUESTION_BYTES = 2**17
_SLOWEST = 2**23  # bytes a second; a medium that is slower takes longer than computing

_Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Sixteen = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Count = Annotated[int, Meta(ge=0, le=2**40)]


class Challenge(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: _Count
    nonce: _Sixteen
    is_full: bool = False


class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    namespace: _Sixteen
    nonce: _Sixteen
    proof: _Digest


class Welcome(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    is_same: bool
    is_full: bool
    proof: _Digest


class Find(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=1):
    keys: Annotated[list[_Sixteen], Meta(max_length=MOST_KEYS)]


class FirstOf(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=2):
    keys: Annotated[list[_Sixteen], Meta(max_length=MOST_KEYS)]


class Load(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=3):
    key: _Sixteen


Question = Find | FirstOf | Load


class Position(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    index: _Count


class Extent(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    size: _Count


def encoded(message: msgspec.Struct) -> bytes:
    """With its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decoded(body: bytes | bytearray, kind: Any) -> Any:
    """
    Raises:
        msgspec.DecodeError: it is no such message.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (ValueError, RecursionError) as error:  # text that is no UTF-8, lists in lists
        raise msgspec.DecodeError(str(error)) from None


def proof(
    secret: bytes, who: bytes, nonces: bytes, namespace: bytes, is_same: bool = True, is_full: bool = False
) -> bytes:
    """That its maker has the secret.

    Args:
        who: b"reader" or b"server", so that neither can send back what the other one has said.
        nonces: the server's and the reader's.
    """
    return hmac.digest(secret, b"inflight KV peer " + who + nonces + namespace + bytes([is_same, is_full]), "sha256")


def seconds_for(size: int) -> float:
    """In which so many bytes must be sent, beyond the time for any answer."""
    return size / _SLOWEST
