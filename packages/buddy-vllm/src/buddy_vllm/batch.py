"""One pass of a model: which of its requests run which block, and what has run.

Tokens of all requests lie flat, those of one side by side.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

KEY: Final = "buddy_blocks"
"""Name in a request's `extra_args`: the blocks of its plan, which the front end writes."""


def row_of(extra_args: Mapping[str, Any] | None, num_blocks: int) -> NDArray[np.bool_]:
    """Which blocks [blocks] a request runs.

    It never raises: an error in a worker would end the whole engine. What did not come from the
    front end runs at full depth.
    """
    row = np.ones(num_blocks, np.bool_)
    blocks = (extra_args or {}).get(KEY)
    if isinstance(blocks, list | tuple) and blocks:
        named = [block for block in blocks if type(block) is int and 0 <= block < num_blocks]
        if len(named) == len(blocks):
            row[:] = False
            row[named] = True
    return row


class Group:
    """The requests that run a block, where they are not all.

    Attributes:
        requests: Their places in the batch, ascending.
        tokens: Places of their tokens, on the model's device.
        kept: What `Attention` has made for them.
    """

    __slots__ = ("kept", "requests", "tokens")

    def __init__(self, requests: NDArray[np.int64], tokens: torch.Tensor) -> None:
        self.requests, self.tokens = requests, tokens
        self.kept: dict[int, Any] = {}


class Attention(Protocol):
    """Where a pass has its attention metadata from; a runner makes one for each batch."""

    def only(self, layer: Any, group: Group) -> AbstractContextManager[None]:
        """While it is open, a layer attends for these requests alone."""
        ...


class Batch:
    """The requests of one pass.

    Args:
        runs: [requests, blocks], True = run.
        counts: New tokens of each request.
        device: Of the model.
        attention: Narrows attention to some of the requests.
    """

    def __init__(
        self,
        runs: NDArray[np.bool_],
        counts: NDArray[np.integer[Any]],
        device: torch.device,
        attention: Attention,
    ) -> None:
        self.runs, self.counts = runs, counts.astype(np.int64)
        self.device, self.attention = device, attention
        self.executed = np.zeros(len(runs), np.int64)
        """Blocks times tokens that ran, by request; counted where they run."""
        self._starts = np.cumsum(self.counts) - self.counts
        self._everywhere: list[bool] = np.all(runs, axis=0).tolist()
        self._somewhere: list[bool] = np.any(runs, axis=0).tolist()
        self._groups: dict[bytes, Group] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every request runs every block."""
        return all(self._everywhere)

    def is_idle(self, block: int) -> bool:
        """Whether no request runs a block."""
        return not self._somewhere[block]

    def group(self, block: int) -> Group | None:
        """Who runs a block; None where all do. Blocks that the same requests run share one."""
        if self._everywhere[block]:
            return None
        column = self.runs[:, block]
        key = column.tobytes()
        if key not in self._groups:
            requests = np.flatnonzero(column)
            spans = [
                np.arange(self._starts[row], self._starts[row] + self.counts[row])
                for row in requests
            ]
            tokens = torch.from_numpy(np.concatenate(spans)).to(self.device)
            self._groups[key] = Group(requests, tokens)
        return self._groups[key]

    def count(self, blocks: slice) -> None:
        """Note that these blocks have run, each for the requests whose plan has it."""
        self.executed += self.counts * self.runs[:, blocks].sum(1)
