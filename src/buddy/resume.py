"""Resuming: work that was stopped goes on from what it left, and from nothing that other work left.

Whatever may go on has an identity: all that its result depends on, as plain JSON. It stands in the
file beside what was gathered, and a file of another identity is refused by the settings that
differ. Files are written under a temporary name and renamed, so a kill at any moment leaves the
last one whole.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from buddy.errors import BuddyError, ResultError, shown
from buddy.files import system_errors

if TYPE_CHECKING:
    from torch import Tensor

SAVE_EVERY_S: Final = 20.0
_KEY: Final = "buddy"
_ABSENT: Final = object()


def differing(saved: Any, wanted: dict[str, Any]) -> list[str]:
    """Settings in which two identities differ, each as `dtype (was 'float32', is 'bfloat16')`.

    Args:
        saved: What was left: plain JSON, whatever it is.
        wanted: What is asked for now; it can be written as JSON.
    """
    return [
        f"{name or 'identity'} (was {_value(was)}, is {_value(now)})"
        # As JSON gives it back, tuples are lists.
        for name, was, now in _pairs(saved, json.loads(json.dumps(wanted)), "")
        if was != now
    ]


def check_same(
    saved: Any,
    wanted: dict[str, Any],
    what: str,
    advice: str,
    error: type[BuddyError] = ResultError,
) -> None:
    """Refuse what other work left, by the settings that differ.

    Args:
        saved: Its identity.
        wanted: The identity of the work at hand.
        what: The message's beginning, such as `FILE is of another run`.
        advice: The message's end.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`.
    """
    differs = differing(saved, wanted)
    if differs:
        raise error(f"{what}, with other {', '.join(differs)}: {advice}")


def _pairs(saved: Any, wanted: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Both values by dotted name; what is an object in both is taken apart."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*wanted, *saved]):
            place = f"{name}.{key}" if name else key
            yield from _pairs(saved.get(key, _ABSENT), wanted.get(key, _ABSENT), place)
    else:
        yield name, saved, wanted


def _value(value: Any) -> str:
    return "not there" if value is _ABSENT else shown(value, 30)


def fingerprint(tokens: "Tensor") -> list[Any]:
    """Shape and SHA-256 of a text's tokens, for an identity."""
    return [list(tokens.shape), hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """How messages call a file and the work that it belongs to."""

    file: str = ""
    """What stands before the path, such as "the table "."""
    other: str = "belongs to another measurement"
    """What is said of a file of other work."""
    otherwise: str = "delete it to start again, or name another --out"
    """What to do with a file of other work."""
    intact: str = "what was there before is intact"
    """What holds where it cannot be written."""
    error: type[BuddyError] = ResultError
    """What is raised."""


class Partial(NamedTuple):
    """What a file holds: tensors by name, and plain values."""

    tensors: dict[str, "Tensor"]
    values: dict[str, Any]


class ResumeFile:
    """Tensors by name and plain values beside them, written whole or not at all.

    Args:
        path: None to keep nothing.
        identity: What the work depends on, by name; plain JSON.
        words: For messages.
    """

    def __init__(
        self, path: Path | None, identity: dict[str, Any], words: Words | None = None
    ) -> None:
        self._path, self._identity, self._words = path, identity, words or Words()
        self._written_s = time.monotonic()

    def read(self, *names: str) -> "dict[str, Tensor] | None":
        """The tensors that were written last; None if nothing was.

        Args:
            names: Tensors that must be there.

        Raises:
            BuddyError: The file is damaged or belongs to other work.
        """
        partial = self.read_all(*names)
        return None if partial is None else partial.tensors

    def read_all(self, *names: str) -> Partial | None:
        """Tensors as by `read`, with the plain values."""
        from safetensors import SafetensorError, safe_open

        path, words = self._path, self._words
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if _KEY in metadata:
                values = dict(json.loads(metadata[_KEY]))
            else:  # as measurements of importance were written before
                values = {"identity": json.loads(metadata.get("identity", "{}"))}
            saved = values.pop("identity")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(str(error)) from error
        what = f"{path} {words.other}"
        check_same(saved, self._identity, what, words.otherwise, words.error)
        missing = [name for name in names if name not in tensors]
        if missing:
            raise self._damaged(f"it lacks {', '.join(missing)}")
        return Partial(tensors, values)

    def _damaged(self, why: str) -> BuddyError:
        words = self._words
        return words.error(f"{words.file}{self._path} is damaged ({why}): delete it to start again")

    def write(self, tensors: "dict[str, Tensor]", **values: Any) -> None:
        """Replace what was there.

        Args:
            tensors: By name, on any device.
            values: Plain JSON.

        Raises:
            BuddyError: It cannot be written; what was there is intact.
        """
        from safetensors.torch import save_file

        path, words = self._path, self._words
        if path is None:
            return
        about = json.dumps({"identity": self._identity, **values}, sort_keys=True)
        staging = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with system_errors():
                save_file(
                    {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
                    staging,
                    metadata={_KEY: about},
                )
            os.replace(staging, path)
        except OSError as error:
            raise words.error(
                f"{words.file}{path} cannot be written: {error.strerror or error}; {words.intact}"
            ) from error
        finally:
            staging.unlink(missing_ok=True)
        self._written_s = time.monotonic()

    def write_if_due(self, tensors: "Callable[[], dict[str, Tensor]]", **values: Any) -> None:
        """Write, if the last time is long enough ago."""
        if self._path is not None and time.monotonic() - self._written_s > SAVE_EVERY_S:
            self.write(tensors(), **values)

    def remove(self) -> None:
        """Delete the file: the work is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
