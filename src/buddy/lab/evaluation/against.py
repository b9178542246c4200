"""This run beside an earlier one on the same rows: differences are taken row by row.

The standard error of a mean difference counts rows. It says nothing about the seeds of training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from buddy.errors import ResultError
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.samples import Samples, mean_and_error, read_samples

Sample = TypeVar("Sample")


class Against:
    """The samples of an earlier run, found by condition and row.

    Args:
        path: Of its log.

    Raises:
        ResultError: It cannot be read, is damaged, or does not say what was measured.
    """

    def __init__(self, path: Path) -> None:
        self._samples: Samples = read_samples(path)
        if not self._samples.conditions:
            raise ResultError(
                f"{path} does not say which budgets were measured: it was written by an earlier "
                "version, or the run was stopped at once; run that evaluation again"
            )

    def describe(self) -> dict[str, Any]:
        """What a record says of it: which log it was, and of which run."""
        log = self._samples
        return {"samples": str(log.path), "sha256": log.sha256, "run": log.identity}

    def conditions(self) -> list["EarlierCondition"]:
        """All that was measured."""
        log = self._samples
        return [EarlierCondition(log, condition) for condition in log.conditions]

    def beside(self, condition: Condition) -> list["EarlierCondition"]:
        """What was measured at the same budget, one or more.

        Raises:
            ResultError: Nothing was.
        """
        wanted, log = _budget(condition.describe()), self._samples
        earlier_runs = [earlier for earlier in self.conditions() if earlier.budget == wanted]
        if not earlier_runs:
            has = ", ".join(dict.fromkeys(_said(condition) for condition in log.conditions))
            raise ResultError(
                f"{log.path} has nothing at {_said(condition.describe())}, but {has}: measure it "
                "at this budget, or leave --against out"
            )
        return earlier_runs


class EarlierCondition:
    """One policy at one budget, as an earlier run measured it.

    Attributes:
        about: For a figure that is a difference: what is subtracted.
        budget: Tells budgets apart; `blocks` is its number.
    """

    def __init__(self, samples: Samples, condition: dict[str, Any]) -> None:
        self._samples, self._key = samples, str(condition.get("key"))
        label, policy = (str(condition.get(name)) for name in ("label", "policy"))
        self.blocks, self.budget = condition.get("blocks"), _budget(condition)
        self.about = {"minus": label, "minus_policy": policy}

    def marks(self) -> list[str]:
        """Marks of the rows that were measured, in the order of the log."""
        start = f"{self._key} "
        return [key.removeprefix(start) for key in self._samples.entries if key.startswith(start)]

    def rows(self, marks: Sequence[str], kind: type[Sample]) -> list[Sample]:
        """The samples of these rows.

        Args:
            marks: Of rows, as they end the keys of samples.
            kind: Of sample.

        Raises:
            ResultError: Some were not measured: the two runs are of different rows.
        """
        samples = [self._samples.find(f"{self._key} {mark}", kind) for mark in marks]
        missing = samples.count(None)
        if missing:
            raise ResultError(
                f"{self._samples.path} lacks {missing} of the {len(marks)} rows that are measured "
                "here: differences are taken row by row; measure both on the same rows"
            )
        return [sample for sample in samples if sample is not None]


def mean_difference(pairs: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """The mean of ours less theirs, row by row, and its standard error over rows."""
    return mean_and_error([own - other for own, other in pairs])


def _budget(condition: dict[str, Any]) -> tuple[Any, ...]:
    names = ("num_blocks", "blocks", "prefill_blocks", "budget")
    return tuple(condition.get(name) for name in names)


def _said(condition: dict[str, Any]) -> str:
    prompt = condition.get("prefill_blocks")
    phase = "" if prompt is None else f" with prompts at {prompt}"
    budget = condition.get("budget", condition.get("blocks"))
    return f"{budget} of {condition.get('num_blocks')} blocks{phase}"
