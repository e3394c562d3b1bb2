"""The admin key: what a caller must send to use Triton's management endpoints and the backend's `control` requests.

Triton checks the header itself (`--http-restricted-api`, `--grpc-restricted-protocol`).  Its backend reads the key
from the environment, because a `control` request arrives at the inference endpoint, which stays open.
"""

from __future__ import annotations

import re
import secrets

from inflight_client.local_servers import ADMIN_HEADER, admin_headers

__all__ = ["ENVIRONMENT", "check_key", "grpc_metadata", "http_headers", "new_key", "restrictions"]

ENVIRONMENT = "INFLIGHT_ADMIN_KEY"

_CATEGORIES = ("model-repository", "shared-memory", "statistics", "trace", "logging")
_MIN_LENGTH = 16


def new_key() -> str:
    """A key of 192 random bits, in characters that need no quoting."""
    return secrets.token_urlsafe(24)


def check_key(key: str) -> None:
    """Triton's options separate with `:`, `,` and `=`, and a header cannot hold every character.

    Raises:
        ValueError: the key is short, or has a character other than letters, digits and `. _ ~ -`.
    """
    if not re.fullmatch(rf"[A-Za-z0-9._~-]{{{_MIN_LENGTH},256}}", key):
        raise ValueError(
            f"the admin key must have {_MIN_LENGTH} to 256 characters, each a letter, a digit or one of . _ ~ -; "
            "leave it out to get a random one"
        )


def http_headers(key: str | None) -> dict[str, str]:
    """Headers for Triton's HTTP management endpoints; none without a key."""
    return admin_headers("http", key)


def grpc_metadata(key: str | None) -> dict[str, str]:
    """Metadata for Triton's gRPC management calls; none without a key."""
    return admin_headers("grpc", key)


def restrictions(key: str) -> list[str]:
    """Arguments with which `tritonserver` refuses the management endpoints to callers that do not send `key`."""
    rule = f"{','.join(_CATEGORIES)}:{ADMIN_HEADER}={key}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]
