"""Keys: who may use the server. They are compared in constant time and never written anywhere."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starlette.types import Scope

from buddy.errors import ServingError
from buddy.files import read_text
from buddy.serving.http.refusals import Refusal

_LEAST: Final = 16
_MOST_BYTES: Final = 2**20
_OPEN: Final = ("/", "/health", "/ready", "/docs", "/openapi.json")
_OPEN_FOLDER: Final = "/playground/"
OWNER: Final = "buddy.owner"
"""Where a request's scope says whose it is, by the digest of a key."""


def is_open(path: str) -> bool:
    """Whether anybody may ask for what is at a path, keys or none."""
    return path in _OPEN or path.startswith(_OPEN_FOLDER)


class Keys:
    """The keys that are taken.

    Args:
        keys: Each of at least 16 printable ASCII characters without spaces.

    Raises:
        ServingError: There is none, or one is too short or cannot stand in a header. The message
            names its place, not the key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        for number, key in enumerate(keys, 1):
            if len(key) < _LEAST or not all("!" <= sign <= "~" for sign in key):
                raise ServingError(
                    f"key {number} cannot be used: expected at least {_LEAST} ASCII characters "
                    "without spaces, such as `openssl rand -hex 24` writes"
                )
        if not keys:
            raise ServingError("there is no key: write one a line")
        # Of one length, so that comparing them takes one time.
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """The keys of a file, one a line; empty lines and lines that begin with # are none.

        Raises:
            ServingError: The file cannot be read, has no key, or one that cannot be used.
        """
        lines = [
            line.strip() for line in read_text(path, ServingError, most=_MOST_BYTES).splitlines()
        ]
        try:
            return cls([line for line in lines if line and not line.startswith("#")])
        except ServingError as error:
            raise ServingError(f"{path}: {error}") from error

    def takes(self, key: bytes) -> bool:
        """Whether it is one of them; the time does not tell how much of it is right."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)  # once all are compared

    def missing(self, scope: Scope) -> Refusal | None:
        """The refusal of a request without a key; None where it has one or needs none.

        Open are the page and its files, `/docs`, and whether the server is alive and ready.
        """
        if is_open(scope["path"]):
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if kind.lower() == b"bearer" and self.takes(key.strip()):
            scope[OWNER] = _digest(key.strip()).hex()
            return None
        return Refusal(
            401,
            "a valid key is needed: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
