"""What a run tells: JSON lines and TensorBoard, and the warning that a router has collapsed."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buddy.errors import TrainingError

_FEW_ROWS = 32
"""Fewer routed rows say nothing about a collapse."""


class TrainingLog:
    """JSON lines, one an event, and the same numbers as TensorBoard scalars.

    Args:
        folder: Holds `log.jsonl` and `tensorboard/`.
        step: Steps done; later lines of a run that was killed are dropped, as they come again.
        tensorboard: Whether to write its events.

    Raises:
        TrainingError: The log cannot be written.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        kept = [line for line in self._lines() if line["step"] <= step] if step else []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        try:
            self.path.write_text(text, encoding="utf-8")
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error
        self._events: Any = None
        if tensorboard:
            events = str(folder / "tensorboard")
            self._events = need_tensorboard()(events, purge_step=step + 1)

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # killed while it was written
                break
        return lines

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"the log {self.path} cannot be written: {error.strerror or error}; the last training "
            "state is intact: make room and run the same command with --resume"
        )

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Add one line; numbers go to TensorBoard as `kind/name`, those of a dict one by one."""
        try:
            self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error
        if self._events is None:
            return
        for name, value in values.items():
            if isinstance(value, dict):
                for key, one in value.items():
                    self._events.add_scalar(f"{kind}/{name}/{key}", one, step)
            elif isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write what is still held."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def need_tensorboard() -> Any:
    """What writes TensorBoard's events.

    Raises:
        TrainingError: The package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError(
            'TensorBoard events need the tensorboard package: pip install "buddy-llm[train]", or '
            "set log.tensorboard=false"
        ) from error
    return SummaryWriter


@dataclass(slots=True)
class RouteCounts:
    """Plans seen since the last line of the log.

    Attributes:
        plans: How often each plan ran, by budget in blocks.
    """

    plans: dict[int, Counter[tuple[int, ...]]] = field(default_factory=dict)

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
