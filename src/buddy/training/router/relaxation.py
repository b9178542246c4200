"""Continuous stand-ins for the top-k: forward the hard choice, backward the gate's gradient.

A gate's value is never used; only its derivative by the scores is.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.training.router.recipe import Relaxation


@runtime_checkable
class Gates(Protocol):
    """One relaxation."""

    def __call__(
        self,
        scores: Float[Tensor, "batch middle"],
        mask: Bool[Tensor, "batch middle"],
    ) -> Float[Tensor, "batch middle"]:
        """A gate for each middle block, rising with its score.

        Args:
            scores: Fused scores that the plan was chosen by.
            mask: The plan, True = runs.
        """
        ...


class SoftmaxGates:
    """The paper's: softmax over the middle blocks. Its Jacobian is about 1 / blocks."""

    def __init__(self, scale_by_blocks: bool = False) -> None:
        self.scale_by_blocks = scale_by_blocks

    def __call__(
        self, scores: Float[Tensor, "batch middle"], mask: Bool[Tensor, "batch middle"]
    ) -> Float[Tensor, "batch middle"]:
        """Softmax of the scores, times their number if asked."""
        return torch.softmax(scores, dim=1) * (scores.shape[1] if self.scale_by_blocks else 1)


class SkippedGates:
    """Softmax over the blocks that are skipped: those that run get no gradient.

    What a block does at a gate of 0 and at one of 1 is not compared: tuned weights are near to an
    optimum at 1, where the derivative of a dear block is as small as that of a cheap one.
    """

    def __call__(
        self, scores: Float[Tensor, "batch middle"], mask: Bool[Tensor, "batch middle"]
    ) -> Float[Tensor, "batch middle"]:
        """Softmax of the scores of skipped blocks; zero at others."""
        is_whole = mask.all(1, keepdim=True)
        return torch.softmax(scores.masked_fill(mask & ~is_whole, -torch.inf), dim=1) * ~mask


class SigmoidGates:
    """Sigmoid around the boundary: steep where a block is nearly chosen, flat far from it."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(
        self, scores: Float[Tensor, "batch middle"], mask: Bool[Tensor, "batch middle"]
    ) -> Float[Tensor, "batch middle"]:
        """Sigmoid of the distance to the middle between last kept and first dropped score."""
        fixed = scores.detach()
        last_kept = fixed.masked_fill(~mask, torch.inf).amin(1)
        first_dropped = fixed.masked_fill(mask, -torch.inf).amax(1)
        # Where all or none runs there is no boundary on one side.
        boundary = torch.where(
            last_kept.isinf(),
            first_dropped,
            torch.where(first_dropped.isinf(), last_kept, 0.5 * (last_kept + first_dropped)),
        )
        return torch.sigmoid((scores - boundary[:, None]) / self.temperature)


def make_gates(relaxation: Relaxation, temperature: float) -> Gates:
    """The relaxation of that name; `gumbel` is the scaled softmax of noisy scores."""
    if relaxation == "sigmoid":
        return SigmoidGates(temperature)
    if relaxation == "skipped-softmax":
        return SkippedGates()
    return SoftmaxGates(scale_by_blocks=relaxation != "softmax")


def gumbel_noise(
    rows: Sequence[int], num_middle: int, *, seed: int
) -> Float[Tensor, "batch middle"]:
    """Gumbel noise of a step: top-k of scores plus noise samples plans without replacement.

    Args:
        rows: Places of the rows in the whole batch, over all processes: each row's noise is its
            own, whoever computes it.
        num_middle: Blocks between the first and the last.
        seed: Of the step.
    """
    noise = []
    for row in rows:
        generator = torch.Generator().manual_seed((seed * 65_537 + row) % 2**63)
        uniform = torch.rand(num_middle, generator=generator).clamp(min=1e-10)
        noise.append(-torch.log(-torch.log(uniform)))
    return torch.stack(noise)


def plan_log_prob(
    scores: Float[Tensor, "batch middle"],
    noisy: Float[Tensor, "batch middle"],
    mask: Bool[Tensor, "batch middle"],
) -> Float[Tensor, " batch"]:
    """Log-probability of drawing the kept blocks in the order of their noisy scores.

    Source: the Plackett-Luce law of a Gumbel top-k; its gradient by the scores makes the policy
    gradient of a plan.
    """
    order = noisy.argsort(dim=1, descending=True, stable=True)
    ranked = scores.gather(1, order)
    # Of each rank: the log-sum of all scores not drawn before it.
    rest = ranked.flip(1).logcumsumexp(1).flip(1)
    return ((ranked - rest) * mask.gather(1, order)).sum(1)
