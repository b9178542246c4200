"""What a step will cost: seconds from the counts of its lanes, corrected while the server runs.

A step costs `a_B + w * union + r_B * row_blocks + c * block_context`, and what its prompt lanes
add. B is the number of rows. `a_B` and `r_B` are no constants: the time that a block takes grows
with the lanes that run it along a broken line, which never falls.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

import numpy as np
from jaxtyping import Float

from buddy.errors import ResultError
from buddy.serving.control.protocol import StepShape

_KNOTS: Final = (1, 2, 4, 8, 16, 32)
"""Lanes of a block at which the line may bend; those at which steps are measured."""
_PIECES: Final = tuple(
    (low, high - low) for low, high in zip(_KNOTS, (*_KNOTS[1:], math.inf), strict=True)
)
_HUBER: Final = 1.345
"""Deviations beyond which an error counts by its size, no longer by its square."""
_ROUNDS: Final = 8


def features(shape: StepShape, plain: int = 0) -> list[float]:
    """The counts that a step's cost is linear in, with no coefficient below zero.

    Args:
        shape: Of the step.
        plain: New tokens up to which those of prompts cost what those of answers do.
    """
    union, prompt = float(shape.union), shape.prompt_lanes
    row_blocks, block_context = float(shape.row_blocks), float(shape.block_context)
    prompt_blocks = shape.prompt_blocks + shape.scored_blocks
    if prompt and shape.rows + prompt <= plain:
        row_blocks += prompt_blocks
        block_context += shape.prompt_blocks * prompt / 2.0
        prompt = 0
    lanes = row_blocks / union if union else 0.0  # of a block that is read
    counts = [1.0, float(shape.rows), union]
    for low, wide in _PIECES:
        over = lanes - low
        counts.append(0.0 if over <= 0.0 else union * (over if over < wide else wide))
    counts += (
        block_context,
        1.0 if prompt else 0.0,
        union if prompt else 0.0,
        prompt_blocks if prompt else 0.0,
        shape.prompt_blocks * prompt / 2.0,  # what a prompt looks at of itself
    )
    return counts


NUM_COEFFICIENTS: Final = len(features(StepShape()))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts how long a step takes.

    Attributes:
        coefficients: Seconds for each of `features`, none below zero.
        plain: See `features`.
    """

    coefficients: tuple[float, ...]
    plain: int = 0

    def __post_init__(self) -> None:
        if len(self.coefficients) != NUM_COEFFICIENTS or not all(
            math.isfinite(coefficient) and coefficient >= 0 for coefficient in self.coefficients
        ):
            raise ResultError(
                f"a cost model has {NUM_COEFFICIENTS} numbers, none below zero, got "
                f"{len(self.coefficients)}: measure it anew"
            )
        if not any(self.coefficients):
            raise ResultError("a cost model in which nothing takes time is none: measure it anew")

    def predict(self, shape: StepShape) -> float:
        """Seconds of a step, as on the day it was measured."""
        return float(sum(map(mul, self.coefficients, features(shape, self.plain))))


def fit(shapes: Sequence[StepShape], seconds: Sequence[float], plain: int = 0) -> CostModel:
    """Fit a model to measured steps, by relative errors; steps that were disturbed count less.

    Args:
        shapes: Of the steps.
        seconds: That each took, above zero.
        plain: See `features`.

    Raises:
        ResultError: There are no steps, or one took no time.
    """
    taken = np.asarray(seconds, np.float64)
    if not len(taken) or len(taken) != len(shapes) or not bool((taken > 0).all()):
        raise ResultError(
            f"a cost model is fitted to steps that took time, got {len(shapes)} steps and "
            f"{len(taken)} times: measure them again"
        )
    counts = np.array([features(shape, plain) for shape in shapes])
    relative = counts / taken[:, None]  # of 1 = the time taken
    weights = np.ones(len(taken))
    coefficients = np.zeros(NUM_COEFFICIENTS)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients = non_negative(relative * root[:, None], root)
        error = np.abs(relative @ coefficients - 1.0)
        spread = max(1.4826 * float(np.median(error)), 1e-6)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(error, 1e-12))
    return CostModel(tuple(coefficients.tolist()), plain)


def non_negative(
    matrix: Float[np.ndarray, "rows columns"], target: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " columns"]:
    """Least squares with no coefficient below zero.

    Columns that are zero get the coefficient zero.

    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23.
    """
    size = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(size > 0, size, 1.0)
    columns = scaled.shape[1]
    free = np.zeros(columns, np.bool_)
    solution = np.zeros(columns)
    for _ in range(3 * columns):
        slope = np.where(free, -np.inf, scaled.T @ (target - scaled @ solution))
        if slope.max() <= 1e-10 * max(1.0, float(np.linalg.norm(target))):
            break
        free[int(slope.argmax())] = True
        while True:
            best = np.zeros(columns)
            best[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            step = float(
                (solution[below] / np.maximum(solution[below] - best[below], 1e-300)).min()
            )
            solution = solution + step * (best - solution)
            free &= solution > 1e-14
            solution[~free] = 0.0
        solution = best
    return np.where(size > 0, solution / np.where(size > 0, size, 1.0), 0.0)


class Correction:
    """How many times as long as predicted steps take now: a moving average that no step can seize.

    Args:
        rate: Share of the newest step.
        clip: A step counts as at most this many times slower or faster than the average.
        least: Bounds of the average.
        most: Bounds of the average.
    """

    def __init__(
        self, rate: float = 0.1, clip: float = 1.5, least: float = 0.25, most: float = 8.0
    ) -> None:
        self._rate, self._clip = rate, math.log(clip)
        self._bounds = math.log(least), math.log(most)
        self._log, self._steps = 0.0, 0

    @property
    def factor(self) -> float:
        """What a prediction is multiplied by."""
        return math.exp(self._log)

    def update(self, actual_s: float, predicted_s: float) -> None:
        """Take in a step, as the model alone predicted it."""
        if actual_s <= 0 or predicted_s <= 0:
            return
        self._steps += 1
        off = math.log(actual_s / predicted_s) - self._log
        off = min(max(off, -self._clip), self._clip)
        moved = self._log + max(self._rate, 1.0 / (self._steps + 2)) * off
        self._log = min(max(moved, self._bounds[0]), self._bounds[1])
