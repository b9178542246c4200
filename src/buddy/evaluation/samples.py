"""The log of every sample: written as the run goes, and what an interrupted run goes on from."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from buddy.errors import ResultError
from buddy.files import write_text


class SampleLog:
    """JSON lines: what the run was on the first one, then one a sample.

    Args:
        path: Made, or continued if it belongs to the same run.
        identity: All that the samples depend on but what is in their keys: model, data, seed.

    Raises:
        ResultError: The file is damaged, belongs to another run, or cannot be written.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        header = json.dumps({"run": identity}, sort_keys=True)
        lines = [header, *self._read(header)]
        # Written whole, so that a line cut off by a crash does not swallow the next.
        write_text(path, "".join(f"{line}\n" for line in lines))
        self._file = path.open("a", encoding="utf-8")

    def _read(self, header: str) -> list[str]:
        if not self.path.exists():
            return []
        try:
            first, *rest = self.path.read_text(encoding="utf-8").splitlines() or [header]
        except (OSError, UnicodeDecodeError) as error:
            raise ResultError(f"sample log {self.path} cannot be read: {error}") from error
        if first != header:
            raise ResultError(
                f"{self.path} holds samples of another run (other model, data or settings): "
                "delete it to start again, or name another --out"
            )
        kept = []
        for number, line in enumerate(rest, start=2):
            try:
                entry = json.loads(line)
                self._entries[entry["key"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                if number - 1 == len(rest):
                    break  # the run was killed while it wrote its last line
                raise ResultError(
                    f"{self.path}, line {number}, is damaged ({error}): delete the file to start "
                    "again"
                ) from error
            kept.append(line)
        return kept

    @property
    def num_samples(self) -> int:
        """Logged so far, by earlier runs too."""
        return len(self._entries)

    def find(self, key: str) -> dict[str, Any] | None:
        """What was logged under this key; None if nothing was."""
        return self._entries.get(key)

    def add(self, key: str, **entry: Any) -> None:
        """Log a sample, at once.

        Raises:
            ResultError: The disk is full, or the file cannot be written; earlier samples stay.
        """
        line = {"key": key, **entry}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise ResultError(
                f"sample log {self.path} cannot be written: {error.strerror or error}; the "
                f"{self.num_samples} samples before are kept, and the same command goes on "
                "from them"
            ) from error
        self._entries[key] = line

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError:
            if kind is None:
                raise
