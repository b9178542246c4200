"""Answer loss: logits at answer positions alone, a few at a time, their gradient made at once."""

from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone

HEAD_TOKENS: Final = 128
"""Positions whose logits are held at once."""


class _AnswerLosses(torch.autograd.Function):
    """Negative log-likelihoods; keeps the gradient of the residual in place of the logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, backbone: Backbone) -> Tensor:
        losses: list[Tensor] = []
        slopes: list[Tensor] = []
        needs_slope = hidden.requires_grad
        parts = torch.split(hidden, HEAD_TOKENS), torch.split(targets, HEAD_TOKENS)
        for part, target in zip(*parts, strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_(needs_slope)
                logits = backbone.logits(leaf)
            with torch.no_grad():
                log_probs = torch.log_softmax(logits, 1, dtype=torch.float32)
                losses.append(-log_probs.gather(1, target[:, None])[:, 0])
                if needs_slope:
                    slope = log_probs.exp_()
                    slope[torch.arange(len(target), device=target.device), target] -= 1
            if needs_slope:
                slopes += torch.autograd.grad(logits, leaf, slope.to(logits.dtype))
        if needs_slope:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *by_loss: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * by_loss[0][:, None]).to(slope.dtype), None, None


def answer_losses(
    backbone: Backbone,
    hidden: Float[Tensor, "answers hidden"],
    targets: Int[Tensor, " answers"],
) -> Float[Tensor, " answers"]:
    """Negative log-likelihood of each answer token, in nats, float32.

    The head and the final norm are frozen: their weights get no gradient.

    Args:
        backbone: Whose head is used.
        hidden: The residual after the last block, where the next token is part of an answer.
        targets: Those tokens.
    """
    return cast(Tensor, _AnswerLosses.apply(hidden, targets, backbone))  # type: ignore[no-untyped-call]


def mean_by_row(
    losses: Float[Tensor, " answers"], rows: Int[Tensor, " answers"], batch: int
) -> Float[Tensor, " batch"]:
    """Each row's mean over its answer."""
    total = losses.new_zeros(batch).index_add(0, rows, losses)
    return total / torch.bincount(rows, minlength=batch).clamp(min=1)
