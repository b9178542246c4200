"""What every kind of cache shares: how attention sees one block of it, and how it is indexed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Projector = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(block, residuals [N, D], positions [N]) -> keys and values [N, heads, head]."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block's cache in a pass, under the name by which attention modules call it.

    Attributes:
        write: Stores new keys and values; returns all that there are to attend to.
    """

    write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [sequences, heads, tokens, head]; return all to attend to."""
        return self.write(keys, values)


def lane_index(values: NDArray[np.integer], device: torch.device) -> Tensor:
    """Numbers of lanes, rows or slots, as tensors are indexed by them."""
    return torch.from_numpy(values.astype(np.int64)).to(device)
