"""Resuming: work that was stopped goes on from what it left, and from nothing that other work left.

Whatever may go on has an identity: all that its result depends on, as plain JSON. It stands in the
file beside what was gathered, and a file of another identity is refused by the settings that
differ. Files are written beside their place and renamed, so a kill at any moment leaves the last
one whole. Each has a checksum of all that is in it, and is taken up only if that holds and every
tensor has the shape that the work gives it.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from buddy.errors import BuddyError, ResultError, reason, shown
from buddy.files import check_readable, replacing

if TYPE_CHECKING:
    from torch import Tensor

SAVE_EVERY_S: Final = 20.0
_KEY: Final = "buddy"
_CHECKSUM: Final = "xxh3_128"
"""Keys of a file's metadata; what earlier versions wrote has no checksum."""
_SEAL: Final = "checksum"
"""Key of the checksum among values that are written as JSON."""
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


def checksum(values: Any) -> str:
    """XXH3 of plain JSON values, the same after they were written and read."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(json.dumps(values, allow_nan=False).encode())


def sealed(values: Mapping[str, Any], *beside: Any) -> dict[str, Any]:
    """Plain values with a checksum of them and of what stands beside them in their file.

    Raises:
        ValueError: A number is not finite.
    """
    return {**values, _SEAL: checksum([*beside, values])}


def opened(values: Mapping[str, Any], *beside: Any) -> tuple[dict[str, Any], bool | None]:
    """The values without their checksum, and whether it holds; None = there is none."""
    left = dict(values)
    seal = left.pop(_SEAL, None)
    return left, None if seal is None else bool(seal == checksum([*beside, left]))


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

    def read(
        self, like: "Mapping[str, Tensor]", optional: "Mapping[str, Tensor] | None" = None
    ) -> Partial | None:
        """What was written last; None if nothing was.

        Args:
            like: Tensors that must be there: each has this dtype and shape, in which 0 stands for
                any length.
            optional: Tensors that may be there beside them; no others may.

        Raises:
            BuddyError: The file is damaged or belongs to other work.
        """
        from safetensors import SafetensorError, safe_open

        path, words = self._path, self._words
        if path is None or not path.exists():
            return None
        check_readable(path, words.error)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                values = _values(metadata)
                saved = values.pop("identity")
                what = f"{path} {words.other}"
                check_same(saved, self._identity, what, words.otherwise, words.error)
                expected = {**like, **(optional or {})}
                names = set(file.keys())
                self._check_names(names - set(expected), set(like) - names)
                tensors = {name: file.get_tensor(name) for name in sorted(names)}
        except BuddyError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise self.damaged(reason(error)) from error
        checksum = metadata.get(_CHECKSUM)
        if checksum is not None and checksum != _checksum(metadata[_KEY], tensors):
            raise self.damaged("its checksum is another")
        for name, tensor in tensors.items():
            self._check_shape(name, tensor, expected[name])
        return Partial(tensors, values)

    def _check_names(self, unknown: set[str], missing: set[str]) -> None:
        if unknown or missing:
            word, names = ("lacks", missing) if missing else ("has an unknown", unknown)
            few = ", ".join(shown(name) for name in sorted(names)[:3])
            raise self.damaged(f"it {word} {few}")

    def _check_shape(self, name: str, tensor: "Tensor", like: "Tensor") -> None:
        fits = len(tensor.shape) == len(like.shape) and all(
            length in (0, size) for size, length in zip(tensor.shape, like.shape, strict=True)
        )
        if not fits or tensor.dtype != like.dtype:
            has, expected = (f"{t.dtype} {list(t.shape)}" for t in (tensor, like))
            raise self.damaged(f"expected {name} to be {expected}, got {has}")

    def check_done(self, done: Any, most: int, rows: "Iterable[Tensor]" = ()) -> int:
        """How far the work has come, as the file says it.

        Args:
            done: Any value.
            most: All that there is to do.
            rows: Tensors that have a row for each that is done.

        Raises:
            BuddyError: It is no number from 0 to `most`, or the rows are more or fewer.
        """
        if type(done) is not int or not 0 <= done <= most:
            raise self.damaged(f"it says that {shown(done)} of {most} are done")
        lengths = {len(tensor) for tensor in rows} - {done}
        if lengths:
            raise self.damaged(f"it has {lengths.pop()} rows and says that {done} are done")
        return done

    def damaged(self, why: str) -> BuddyError:
        """The error that says that the file is damaged, and why."""
        words = self._words
        return words.error(f"{words.file}{self._path} is damaged ({why}): delete it to start again")

    def write(self, tensors: "Mapping[str, Tensor]", **values: Any) -> None:
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
        plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        metadata = {_KEY: about, _CHECKSUM: _checksum(about, plain)}
        try:
            with replacing(path) as new:
                save_file(plain, new, metadata=metadata)
        except OSError as error:
            raise words.error(
                f"{words.file}{path} cannot be written: {error.strerror or error}; {words.intact}"
            ) from error
        self._written_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the last time it was written is long enough ago."""
        return self._path is not None and time.monotonic() - self._written_s > SAVE_EVERY_S

    def write_if_due(self, tensors: "Callable[[], Mapping[str, Tensor]]", **values: Any) -> None:
        """Write, if it is due."""
        if self.is_due:
            self.write(tensors(), **values)

    def remove(self) -> None:
        """Delete the file: the work is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _values(metadata: dict[str, str]) -> dict[str, Any]:
    """The plain values of a file, `identity` among them."""
    if unknown := set(metadata) - {_KEY, _CHECKSUM, "identity", "format"}:
        raise ValueError(f"it has an unknown {shown(unknown.pop())}")
    if _KEY in metadata:
        return dict(json.loads(metadata[_KEY]))
    if _CHECKSUM in metadata:
        raise KeyError(_KEY)
    # As measurements of importance were written before.
    return {"identity": json.loads(metadata.get("identity", "{}"))}


def _checksum(about: str, tensors: "Mapping[str, Tensor]") -> str:
    """XXH3 of plain values, names, dtypes, shapes and bytes: as fast as the memory."""
    import torch
    from xxhash import xxh3_128

    checksum = xxh3_128(about.encode())
    for name, tensor in sorted(tensors.items()):
        checksum.update(f"{name!r} {tensor.dtype} {list(tensor.shape)}".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()
