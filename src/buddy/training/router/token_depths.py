"""How deep each token of a training batch runs: prompt, answer, and changes within an answer."""

import random
from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from buddy.training.batches import Batch
from buddy.training.router.recipe import BudgetSettings

_SALT = 7_919


def token_depths(
    settings: BudgetSettings,
    batch: Batch,
    budgets: Int[Tensor, " batch"],
    choices: Sequence[int],
    num_blocks: int,
    places: Sequence[int],
    seed: int,
) -> Int[Tensor, "batch tokens"]:
    """Blocks of each token.

    Args:
        settings: Shares of examples whose prompt runs full, and whose answer is mixed.
        batch: Prompts and answers.
        budgets: Of each row, in blocks.
        choices: Budgets that are drawn where an answer changes its depth.
        num_blocks: Blocks of the model.
        places: Of the rows in the whole batch, over all processes.
        seed: Of the step.
    """
    depths = budgets[:, None].expand(batch.token_ids.shape).clone()
    if settings.full_prompts == 0:
        return depths
    for row, place in enumerate(places):
        draw = random.Random(f"{seed}-{_SALT}-{place}")
        is_full, is_mixed = draw.random() < settings.full_prompts, draw.random()
        if not is_full:
            continue
        prompt = int(batch.is_prompt[row].sum())
        depths[row, :prompt] = num_blocks
        if is_mixed >= settings.mixed_answers:
            continue
        column = prompt
        while column < depths.shape[1]:
            length = 1 + int(draw.expovariate(1 / settings.stretch))
            depths[row, column : column + length] = draw.choice(choices)
            column += length
    return depths
