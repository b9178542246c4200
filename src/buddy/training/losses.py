"""Losses by the head: cross-entropy with the data, and with what a teacher says.

Logits are computed where they are needed alone, a few positions at a time, and the gradient by the
residual is made at once, so that no whole table of logits is ever held: of student `p`, teacher `q`
and data `y`, a position has the gradient `(a + b) p - a y - b q` by its logits, exactly, over all
tokens.
"""

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone

HEAD_TOKENS: Final = 128
"""Positions whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """What a teacher says at the first of the positions.

    Attributes:
        hidden: Its residual after its last block.
        weights: Of its cross-entropy, by position.
        backbone: Whose head is used for it.
    """

    hidden: Float[Tensor, "taught teacher_hidden"]
    weights: Float[Tensor, " taught"]
    backbone: Backbone


class _HeadLosses(torch.autograd.Function):
    """Weighted losses and plain ones; keeps the gradient of the residual in place of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor,
        backbone: Backbone,
        teaching: Teaching | None,
    ) -> tuple[Tensor, Tensor]:
        weighted: list[Tensor] = []
        losses: list[Tensor] = []
        slopes: list[Tensor] = []
        needs_slope = ctx.needs_input_grad[0]
        taught = 0 if teaching is None else len(teaching.weights)
        for piece in _pieces(taught, len(hidden)):
            target, weight = targets[piece], weights[piece]
            with torch.enable_grad():
                leaf = hidden[piece].detach().requires_grad_(needs_slope)
                logits = backbone.logits(leaf)
            log_probs = torch.log_softmax(logits.detach(), 1, dtype=torch.float32)
            loss = -log_probs.gather(1, target[:, None])[:, 0]
            objective, wanted, of_probs = weight * loss, None, weight
            if teaching is not None and piece.start < taught:
                wanted = torch.softmax(
                    teaching.backbone.logits(teaching.hidden[piece]), 1, torch.float32
                )
                wanted *= teaching.weights[piece, None]
                objective -= (wanted * log_probs).sum(1)
                of_probs = weight + teaching.weights[piece]
            weighted.append(objective)
            losses.append(loss)
            if needs_slope:
                slope = log_probs.exp_().mul_(of_probs[:, None])
                slope[torch.arange(len(target), device=target.device), target] -= weight
                if wanted is not None:
                    slope -= wanted
                slopes += torch.autograd.grad(logits, leaf, slope.to(logits.dtype))
        if needs_slope:
            ctx.save_for_backward(torch.cat(slopes))
        plain = torch.cat(losses)
        ctx.mark_non_differentiable(plain)
        return torch.cat(weighted), plain

    @staticmethod
    def backward(ctx: Any, *by_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * by_loss[0][:, None]).to(slope.dtype), None, None, None, None


def _pieces(taught: int, positions: int) -> list[slice]:
    """Ranges of positions that are computed together: taught ones and others apart."""
    parts = ((0, taught), (taught, positions))
    return [
        slice(start, min(start + HEAD_TOKENS, stop))
        for begin, stop in parts
        for start in range(begin, stop, HEAD_TOKENS)
    ]


def weighted_losses(
    backbone: Backbone,
    hidden: Float[Tensor, "positions hidden"],
    targets: Int[Tensor, " positions"],
    weights: Float[Tensor, " positions"],
    teaching: Teaching | None = None,
) -> tuple[Float[Tensor, " positions"], Float[Tensor, " positions"]]:
    """Each position's part of what a step minimises, and its plain negative log-likelihood.

    Both are in nats and float32. The first can be differentiated by `hidden`; the second cannot.
    Heads and final norms are frozen: their weights get no gradient.

    Args:
        backbone: Of the student, whose head is used.
        hidden: Its residual after the last block.
        targets: The tokens that come next.
        weights: Of the cross-entropy with these tokens.
        teaching: Adds the cross-entropy with a teacher's distribution, at the first positions.
    """
    losses = _HeadLosses.apply(hidden, targets, weights, backbone, teaching)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], losses)


def answer_losses(
    backbone: Backbone,
    hidden: Float[Tensor, "answers hidden"],
    targets: Int[Tensor, " answers"],
) -> Float[Tensor, " answers"]:
    """Negative log-likelihood of each answer token, in nats, float32; differentiable by `hidden`.

    Args:
        backbone: Whose head is used.
        hidden: The residual after the last block, where the next token is part of an answer.
        targets: Those tokens.
    """
    return weighted_losses(
        backbone, hidden, targets, torch.ones_like(targets, dtype=torch.float32)
    )[0]


def mean_by_row(
    losses: Float[Tensor, " answers"], rows: Int[Tensor, " answers"], batch: int
) -> Float[Tensor, " batch"]:
    """Each row's mean over its answer."""
    total = losses.new_zeros(batch).index_add(0, rows, losses)
    return total / torch.bincount(rows, minlength=batch).clamp(min=1)


def group_advantages(
    rewards: Float[Tensor, "batch samples"], epsilon: float = 1e-6
) -> Float[Tensor, "batch samples"]:
    """Each reward less its group's mean, over the group's population standard deviation."""
    # Less the first of the group: of equal rewards nothing is left, where a mean would be rounded.
    apart = rewards - rewards[:, :1]
    centred = apart - apart.mean(1, keepdim=True)
    return centred / (apart.std(1, correction=0, keepdim=True) + epsilon)
