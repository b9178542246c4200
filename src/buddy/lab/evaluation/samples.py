"""The log of every sample: written as the run goes, and what an interrupted run goes on from.

Each line has a checksum of what else is on it; logs of earlier versions have none.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar, cast

from buddy.errors import ResultError
from buddy.files import parse_json, write_text
from buddy.processes import ALONE, Ranks
from buddy.resume import check_same, opened, sealed
from buddy.settings import build

Sample = TypeVar("Sample")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Samples:
    """What a log holds.

    Attributes:
        path: Of the log.
        identity: All that the samples depend on but what is in their keys.
        conditions: That were measured: as `Condition.describe`, and `key`, which begins the keys
            of its samples.
        entries: By key.
        sha256: Of the whole file.
    """

    path: Path
    identity: dict[str, Any]
    conditions: list[dict[str, Any]] = field(default_factory=list)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    sha256: str = ""

    def find(self, key: str, kind: type[Sample]) -> Sample | None:
        """What was logged under this key, as a dataclass; None if nothing was.

        Raises:
            ResultError: It is no such sample.
        """
        entry = self.entries.get(key)
        if entry is None:
            return None
        values = {name: value for name, value in entry.items() if name != "key"}
        return build(kind, values, f"{self.path}: sample {key!r}", ResultError)


def read_samples(path: Path) -> Samples:
    """Read a log.

    A last line that was cut off is left out: the run was killed while it wrote it.

    Raises:
        ResultError: It cannot be read, or is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ResultError(f"sample log {path} cannot be read: {error.strerror or error}") from error
    header, *lines = content.split(b"\n")
    if lines and not _is_whole(lines[-1]):
        lines.pop()
    where = f"sample log {path}, line 1 (delete the file to start again),"
    first, is_sealed = _opened(header, where, needs_seal=False)
    identity = first.get("run")
    if not isinstance(identity, dict) or len(first) > 1:
        raise ResultError(f"{path} is no sample log: its first line does not say of which run")
    samples = Samples(path, identity, sha256=hashlib.sha256(content).hexdigest())
    for number, line in enumerate(lines, start=2):
        where = f"{path}, line {number} (delete the line, and it is measured again),"
        fields, _ = _opened(line, where, needs_seal=is_sealed)
        if isinstance(fields.get("key"), str):
            samples.entries[fields["key"]] = fields
        elif isinstance(fields.get("condition"), dict):
            samples.conditions.append(fields["condition"])
        else:
            raise ResultError(f"{where} is damaged: expected a sample with its key")
    return samples


def _opened(line: bytes, where: str, *, needs_seal: bool) -> tuple[dict[str, Any], bool]:
    """What is on a line, and whether it has a checksum.

    Raises:
        ResultError: It is damaged, or has none and needs one.
    """
    fields = parse_json(line, where, ResultError)
    if not isinstance(fields, dict):
        raise ResultError(f"{where} is damaged: expected an object")
    fields, is_whole = opened(fields)
    if is_whole is False or (needs_seal and is_whole is None):
        raise ResultError(f"{where} is damaged: its checksum is another")
    return fields, is_whole is not None


def _is_whole(line: bytes) -> bool:
    """Whether the last line, which has no end, is a sample for all that."""
    try:
        parse_json(line, "", ResultError)
    except ResultError:
        return False
    return True


class SampleLog:
    """JSON lines: what the run was on the first one, then one a sample or a condition.

    Args:
        path: Made, or continued if it belongs to the same run.
        identity: All that the samples depend on but what is in their keys: fingerprints of the
            model, settings, seed.
        ranks: Processes that share the work: all know the samples, and the writer writes them.

    Raises:
        ResultError: The file is damaged, belongs to another run, or cannot be written; or the
            processes are not at the same work.
    """

    def __init__(self, path: Path, identity: dict[str, Any], ranks: Ranks = ALONE) -> None:
        self.path, self.ranks = path, ranks
        self._file: TextIO | None = None
        self._samples = ranks.from_writer(lambda: self._begun(identity))
        what = f"process {ranks.rank} of this launch measures something else than the first"
        check_same(self._samples.identity, identity, what, "start all with the same files")
        if ranks.is_writer:
            self._open()

    def _begun(self, identity: dict[str, Any]) -> Samples:
        """What is in the file."""
        path = self.path
        if not path.exists() or not path.stat().st_size:
            return Samples(path, identity)
        samples = read_samples(path)
        what = f"{path} holds samples of another run"
        advice = "delete it to start again, or name another --out"
        check_same(samples.identity, identity, what, advice)
        return samples

    def _open(self) -> None:
        lines: list[dict[str, Any]] = [
            {"run": self._samples.identity},
            *({"condition": condition} for condition in self._samples.conditions),
            *self._samples.entries.values(),
        ]
        # Written whole, so that a line cut off by a crash does not swallow the next.
        write_text(self.path, "".join(f"{json.dumps(sealed(line))}\n" for line in lines))
        self._file = self.path.open("a", encoding="utf-8")

    @property
    def num_samples(self) -> int:
        """Logged so far, by earlier runs too."""
        return len(self._samples.entries)

    def find(self, key: str, kind: type[Sample]) -> Sample | None:
        """What was logged under a key, as `Samples.find` gives it."""
        return self._samples.find(key, kind)

    def declare(self, condition: dict[str, Any]) -> None:
        """Log what is measured, once.

        Raises:
            ResultError: As `add`.
        """
        condition = json.loads(json.dumps(condition))
        if condition not in self._samples.conditions:
            self._write({"condition": condition})
            self._samples.conditions.append(condition)

    def add(self, key: str, **entry: Any) -> None:
        """Log a sample, at once.

        Raises:
            ResultError: The disk is full, or the file cannot be written; or a number is not
                finite. Earlier samples stay.
        """
        self._samples.entries[key] = self._write({"key": key, **entry})

    def _write(self, line: dict[str, Any]) -> dict[str, Any]:
        """Returns the line as it will be read."""
        try:
            text = json.dumps(sealed(line))
        except ValueError as error:
            raise ResultError(
                f"a sample has a number that is not finite ({line.get('key')}): the model's "
                "weights are broken, or its dtype is too narrow; try another dtype"
            ) from error
        try:
            if self._file is not None:
                self._file.write(f"{text}\n")
                self._file.flush()
        except OSError as error:
            raise ResultError(
                f"sample log {self.path} cannot be written: {error.strerror or error}; the "
                f"{self.num_samples} samples before are kept, and the same command goes on "
                "from them"
            ) from error
        read: dict[str, Any] = json.loads(json.dumps(line))
        return read

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError:
            if kind is None:
                raise


def measure_missing(
    items: Sequence[tuple[str, Item]],
    kind: type[Sample],
    log: SampleLog | None,
    *,
    batch: int,
    length: Callable[[Item], int],
    measure: Callable[[Sequence[Item]], Sequence[Sample]],
    on_samples: Callable[[Sequence[Item]], None] = lambda items: None,
) -> list[Sample]:
    """The sample of each item: from the log, or measured in batches of like length and logged.

    The processes of the log share the batches, which are those of one process.

    Args:
        items: Each with the key of its sample.
        kind: A dataclass, as the log has it.
        log: Keeps each sample, and gives back those it has.
        batch: Items at a time; the longest first.
        length: What batches are put together by.
        measure: Gives the samples of a batch.
        on_samples: Told whose samples are there: first those that were logged.
    """
    known = [None if log is None else log.find(key, kind) for key, _ in items]
    pending = [place for place, sample in enumerate(known) if sample is None]
    on_samples([item for (_, item), sample in zip(items, known, strict=True) if sample is not None])
    pending.sort(key=lambda place: length(items[place][1]), reverse=True)
    batches = [pending[start : start + batch] for start in range(0, len(pending), batch)]
    found = (ALONE if log is None else log.ranks).share(
        batches, lambda places: measure([items[place][1] for place in places])
    )
    for places, samples in zip(batches, found, strict=True):
        for place, sample in zip(places, samples, strict=True):
            known[place] = sample
            if log is not None:
                log.add(items[place][0], **asdict(cast(Any, sample)))
        on_samples([items[place][1] for place in places])
    return cast(list[Sample], known)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; a single value has none."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error
