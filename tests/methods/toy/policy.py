"""One score a block, drawn once and kept in the checkpoint."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from buddy.depth.policy import DepthPolicy
from buddy.errors import PolicyError
from buddy.policies.learned import LearnedPart, need_part
from buddy.settings import Range, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class ToySizes:
    """What gives the part its shapes; JSON in a checkpoint."""

    num_blocks: Annotated[int, Range(3, 2**16)]
    """Blocks of the model."""

    def __post_init__(self):
        check_ranges(self, PolicyError)


class ToyPart(LearnedPart):
    """What a checkpoint keeps."""

    policy = "toy"
    settings = ToySizes

    def __init__(self, config):
        super().__init__(config)
        self.scores = nn.Parameter(torch.zeros(config.num_blocks))


class ToyPolicy(DepthPolicy):
    """Keeps the blocks of highest score; the base class pins the first and the last."""

    name = "toy"

    def __init__(self, part):
        super().__init__(part.config.num_blocks)
        self.part = part

    @classmethod
    def from_spec(cls, argument, resources):
        """Make it from `toy`."""
        return cls(need_part(ToyPart, resources))

    def scores(self, state, blocks):
        """The same for every row."""
        return self.part.scores.detach().expand(len(state), -1)

    def describe(self):
        """A few words for a summary line."""
        return "toy"
