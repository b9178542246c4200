"""Where a step of stage 1 has a loss, and what each position weighs in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.data.examples import Example
from buddy.training.batches import Batch
from buddy.training.router.recipe import TeacherSettings

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
    row_weights: Float[Tensor, " batch"],
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
        row_weights: Weight of each row's mean answer loss; over the rows of all processes, 1.
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
    in_answers = row_weights / answer.clamp(min=1)
    in_prompts = prompt_loss / max(1, sum(len(example.prompt) - 1 for example in examples))
    data = torch.where(is_answer, in_answers[:, None], in_prompts) * is_token
    taught = torch.zeros_like(data)
    if teacher.name is not None:
        is_all = teacher.tokens == "all"
        may = sum(example.num_tokens - 1 if is_all else len(example.answer) for example in examples)
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
    generator = torch.Generator().manual_seed((seed * 4096 + place) ^ _SALT)
    return torch.rand(count, generator=generator)
