"""The mean of weights over steps, which is steadier than the last of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_EARLY = 10
"""The first steps look back over a part of their number alone: the start is soon forgotten."""


class WeightMean:
    """An exponential mean of what is trained.

    Attributes:
        values: The mean, by name; the weights themselves while it stands in their place.

    Args:
        parameters: By name; their values now are where the mean begins.
        keep: What each step keeps of the mean; step t of the first ones keeps (t + 1) / (t + 10).
    """

    def __init__(self, parameters: Mapping[str, Tensor], keep: float) -> None:
        self._parameters = parameters
        self._keep = keep
        self.values = {name: value.detach().clone() for name, value in parameters.items()}

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take in the weights after a step, counted from 0."""
        keep = min(self._keep, (1 + step) / (_EARLY + step))
        for name, value in self._parameters.items():
            self.values[name].lerp_(value, 1 - keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the mean in the place of the weights, within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, value in self._parameters.items():
            now = value.clone()
            value.copy_(self.values[name])
            self.values[name].copy_(now)
