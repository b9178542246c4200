"""What a step of stage 1 minimises: cross-entropy with the data, and with what a teacher says.

The output projection is computed for a few positions at a time, and the gradient by the residual is
made at once, so that no whole table of logits is ever held: of student `p`, teacher `q` and data
`y`, a position has the gradient `(a + b) p - a y - b q` by its logits, exactly, over all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.data.examples import Example
from buddy.training.batches import Batch
from buddy.training.joint.recipe import TeacherSettings
from buddy.training.losses import HEAD_TOKENS

_SALT = 15_485_863


@dataclass(frozen=True, slots=True)
class Spots:
    """Positions of a batch at which a step has a loss; those that a teacher teaches stand first.

    Attributes:
        rows: Of the batch.
        columns: Of the position whose next token is predicted.
        targets: That token.
        data: Weight of the data's cross-entropy there.
        teacher: Weight of the teacher's, of the first positions; no others have one.
        is_answer: Whether the predicted token is part of an answer.
    """

    rows: Int[Tensor, " spots"]
    columns: Int[Tensor, " spots"]
    targets: Int[Tensor, " spots"]
    data: Float[Tensor, " spots"]
    teacher: Float[Tensor, " taught"]
    is_answer: Bool[Tensor, " spots"]


def find_spots(
    batch: Batch,
    by_row: Float[Tensor, " batch"],
    examples: Sequence[Example],
    *,
    prompt_loss: float,
    teacher: TeacherSettings,
    places: Sequence[int],
    seed: int,
) -> Spots:
    """Where a step has a loss, and what each position weighs in it.

    Args:
        batch: Rows of this process.
        by_row: Weight of each row's mean answer loss; over the rows of all processes, 1.
        examples: Of all processes, as often as each is in a batch.
        prompt_loss: Weight of the prompts' mean loss.
        teacher: Its weight, and where it teaches.
        places: Of the rows in the whole batch, over all processes.
        seed: Of the step.

    Returns:
        The positions. A mean loss over prompts, or over what a teacher teaches, counts all its
        tokens the same.
    """
    column = torch.arange(batch.token_ids.shape[1] - 1, device=batch.token_ids.device)
    prompt, answer = batch.is_prompt.sum(1), batch.answer_tokens
    is_answer = torch.zeros_like(batch.token_ids[:, :-1], dtype=torch.bool)
    is_answer[batch.rows, batch.columns] = True
    is_token = column < (prompt + answer - 1)[:, None]
    in_answers = by_row / answer.clamp(min=1)
    in_prompts = prompt_loss / max(1, sum(len(one.prompt) - 1 for one in examples))
    data = torch.where(is_answer, in_answers[:, None], in_prompts) * is_token
    taught = torch.zeros_like(data)
    if teacher.name is not None:
        is_all = teacher.tokens == "all"
        may = sum(one.num_tokens - 1 if is_all else len(one.answer) for one in examples)
        taught += teacher.weight / (may * teacher.share)
        taught *= is_token if is_all else is_answer
        if teacher.share < 1:
            drawn = torch.stack([_draws(seed, place, len(column)) for place in places])
            taught *= drawn.to(taught.device) < teacher.share
    first, others = taught.nonzero(), ((taught == 0) & (data != 0)).nonzero()
    rows, columns = torch.cat([first, others]).unbind(1)
    return Spots(
        rows=rows,
        columns=columns,
        targets=batch.token_ids[rows, columns + 1],
        data=data[rows, columns],
        teacher=taught[first[:, 0], first[:, 1]],
        is_answer=is_answer[rows, columns],
    )


def _draws(seed: int, place: int, count: int) -> Float[Tensor, " count"]:
    """Numbers from 0 to 1, the same wherever the row is computed."""
    made = torch.Generator().manual_seed((seed * 4096 + place) ^ _SALT)
    return torch.rand(count, generator=made)


class _Objective(torch.autograd.Function):
    """The weighted sum; keeps the gradient of the residual in place of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        spots: Spots,
        backbone: Backbone,
        taught: Tensor | None,
        teacher: Backbone | None,
    ) -> tuple[Tensor, Tensor]:
        total = hidden.new_zeros((), dtype=torch.float32)
        losses: list[Tensor] = []
        slopes: list[Tensor] = []
        needs_slope = ctx.needs_input_grad[0]
        for start, stop in _pieces(len(spots.teacher), len(hidden)):
            targets, data = spots.targets[start:stop], spots.data[start:stop]
            with torch.enable_grad():
                leaf = hidden[start:stop].detach().requires_grad_(needs_slope)
                logits = backbone.logits(leaf)
            log_probs = torch.log_softmax(logits.detach(), 1, dtype=torch.float32)
            loss = -log_probs.gather(1, targets[:, None])[:, 0]
            losses.append(loss)
            total += (data * loss).sum()
            wanted, weight = None, data
            if start < len(spots.teacher):
                assert taught is not None
                assert teacher is not None
                wanted = torch.softmax(teacher.logits(taught[start:stop]), 1, torch.float32)
                wanted *= spots.teacher[start:stop, None]
                total -= (wanted * log_probs).sum()
                weight = data + spots.teacher[start:stop]
            if needs_slope:
                slope = log_probs.exp_().mul_(weight[:, None])
                slope[torch.arange(len(targets), device=targets.device), targets] -= data
                if wanted is not None:
                    slope -= wanted
                slopes += torch.autograd.grad(logits, leaf, slope.to(logits.dtype))
        if needs_slope:
            ctx.save_for_backward(torch.cat(slopes))
        by_spot = torch.cat(losses)
        ctx.mark_non_differentiable(by_spot)
        return total, by_spot

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * by[0], None, None, None, None


def _pieces(taught: int, spots: int) -> list[tuple[int, int]]:
    """Ranges of positions that are computed together: taught ones and others apart."""
    parts = ((0, taught), (taught, spots))
    return [
        (start, min(start + HEAD_TOKENS, stop))
        for begin, stop in parts
        for start in range(begin, stop, HEAD_TOKENS)
    ]


def weighted_losses(
    backbone: Backbone,
    hidden: Float[Tensor, "spots hidden"],
    spots: Spots,
    *,
    taught: Float[Tensor, "taught teacher_hidden"] | None = None,
    teacher: Backbone | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, " spots"]]:
    """What a step minimises, and the data's negative log-likelihood at each position, in nats.

    The first can be differentiated by `hidden`; heads and final norms are frozen.

    Args:
        backbone: Of the student, whose head is used.
        hidden: Its residual after the last block, at the positions.
        spots: Where, and the weights.
        taught: The teacher's residual after its last block, at the first positions.
        teacher: Whose head is used for it.
    """
    found = _Objective.apply(hidden, spots, backbone, taught, teacher)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], found)
