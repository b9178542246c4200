"""What a run tells: JSON lines and TensorBoard, and the warning that a router has collapsed."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buddy.errors import TrainingError
from buddy.files import MAX_JSON_BYTES, parse_json, read_text, replacing

_FEW_ROWS = 32
"""Fewer routed rows say nothing about a collapse."""


class TrainingLog:
    """JSON lines, one an event, and the same numbers as TensorBoard scalars.

    Args:
        folder: Holds `log.jsonl` and `tensorboard/`.
        step: Steps done; later lines of a run that was killed are dropped, as they come again.
        tensorboard: Whether to write its events.

    Raises:
        TrainingError: The log cannot be written, or is damaged and to be gone on from.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        lines = [line for line in self._lines() if line["step"] <= step] if step else []
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            with replacing(self.path) as new:
                new.write_text(text, encoding="utf-8")
            self._file = self.path.open("a", encoding="utf-8")
            self._events = _Events(folder / "tensorboard", step) if tensorboard else None
        except OSError as error:
            raise self._failed(error) from error

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = read_text(self.path, TrainingError, most=MAX_JSON_BYTES).splitlines()
        entries = []
        for number, line in enumerate(lines, start=1):
            where = f"{self.path}, line {number},"
            try:
                entry = parse_json(line, where, TrainingError)
                if not isinstance(entry, dict) or type(entry.get("step")) is not int:
                    raise TrainingError(f"{where} is no line of a log")
            except TrainingError as error:
                if number == len(lines):  # killed while it was written
                    break
                raise TrainingError(f"{error}: move the log away to go on without it") from error
            entries.append(entry)
        return entries

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"the log of {self.path.parent} cannot be written: {error.strerror or error}; the last "
            "training state is intact: make room and run the same command with --resume"
        )

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Add one line; numbers go to TensorBoard as `kind/name`, those of a dict one by one."""
        scalars: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, dict):
                scalars |= {f"{kind}/{name}/{key}": float(item) for key, item in value.items()}
            elif isinstance(value, int | float):
                scalars[f"{kind}/{name}"] = float(value)
        try:
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()
            if self._events is not None:
                self._events.add(step, scalars)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the files; all that was written is in them."""
        with suppress(OSError):  # what could not be written has been told
            self._file.close()
        if self._events is not None:
            self._events.close()


class _Events:
    """A file of TensorBoard events.

    TensorBoard's own writer has a thread, which shows a user the traceback of a full disk.

    Args:
        folder: Made if it is not there.
        step: Steps done; TensorBoard forgets later ones, which come again.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._event, records = need_tensorboard()
        folder.mkdir(exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._file = path.open("wb", buffering=0)
        self._records = records(self._file)
        self._write(step=step + 1, file_version="brain.Event:2")
        self._write(step=step + 1, session_log={"status": "START"})

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Write numbers of a step, by their names."""
        values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
        if values:
            self._write(step=step, summary={"value": values})

    def _write(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


def need_tensorboard() -> tuple[Any, Any]:
    """TensorBoard's event, and what writes events as records.

    Raises:
        TrainingError: The package is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise TrainingError(
            'TensorBoard events need the tensorboard package: pip install "buddy-llm[train]", or '
            "set log.tensorboard=false"
        ) from error
    return Event, RecordWriter


@dataclass(slots=True)
class RouteCounts:
    """Plans seen since the last line of the log.

    Attributes:
        plans: How often each plan ran, by budget in blocks.
    """

    plans: dict[int, Counter[tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, counted: Sequence[Sequence[Any]]) -> "RouteCounts":
        """What `to_json` gave."""
        counts = cls()
        for plan, times in counted:
            counts.plans.setdefault(len(plan), Counter())[tuple(plan)] = times
        return counts

    def to_json(self) -> list[tuple[tuple[int, ...], int]]:
        """Plans, and how often each ran."""
        return [pair for counts in self.plans.values() for pair in counts.items()]

    def add(self, plans: Sequence[tuple[int, ...]]) -> None:
        """Count the executed blocks of some rows."""
        for plan in plans:
            self.plans.setdefault(len(plan), Counter())[plan] += 1

    @property
    def num_rows(self) -> int:
        """Rows counted."""
        return sum(counts.total() for counts in self.plans.values())

    @property
    def num_distinct(self) -> int:
        """Distinct plans, over all budgets."""
        return sum(len(counts) for counts in self.plans.values())

    def rates(self, num_blocks: int) -> list[float]:
        """Share of the rows that ran each block."""
        ran = Counter[int]()
        for counts in self.plans.values():
            for plan, times in counts.items():
                for block in plan:
                    ran[block] += times
        return [ran[block] / max(1, self.num_rows) for block in range(num_blocks)]

    def mask_entropy(self, num_blocks: int) -> float:
        """Mean binary entropy of a block's execution at one budget, in bits; 0 = one plan each."""
        total = 0.0
        for counts in self.plans.values():
            own = RouteCounts({0: counts})
            rates = own.rates(num_blocks)
            total += counts.total() * sum(_binary_entropy(rate) for rate in rates) / num_blocks
        return total / max(1, self.num_rows)

    def collapsed(self, num_blocks: int) -> bool:
        """Whether every budget below full depth has one plan, over enough rows to tell."""
        routed = {b: c for b, c in self.plans.items() if 3 < b < num_blocks}
        rows = sum(counts.total() for counts in routed.values())
        return rows >= max(_FEW_ROWS, 4 * len(routed)) and all(len(c) == 1 for c in routed.values())


def _binary_entropy(rate: float) -> float:
    if rate in (0.0, 1.0):
        return 0.0
    return -rate * math.log2(rate) - (1 - rate) * math.log2(1 - rate)
