"""LayerSkip's two schedules: the blocks that an example drops, and the weights of exits' losses."""

import math
import random

from buddy.budget.blocks import least_blocks
from buddy.methods.layerskip.recipe import Curriculum


def drop_rates(highest: float, num_blocks: int) -> list[float]:
    """The chance of each block that an example drops it: 0 for the first, `highest` for the last.

    Source: LayerSkip (Elhoushi et al., 2024): `p_l = p_max (exp(l ln 2 / (L - 1)) - 1)`.
    """
    last = max(1, num_blocks - 1)
    return [highest * math.expm1(block * math.log(2) / last) for block in range(num_blocks)]


def draw_runs(rates: list[float], seed: int, place: int) -> list[bool]:
    """Whether an example runs each block.

    Args:
        rates: As `drop_rates` gives them.
        seed: Of the step.
        place: Of the example in the whole batch, over all processes.
    """
    draw = random.Random(f"{seed}-exits-{place}")
    return [draw.random() >= rate for rate in rates]


def exit_weights(
    curriculum: Curriculum, period: int, scale: float, num_blocks: int, step: int, steps: int
) -> dict[int, float]:
    """The blocks after which the loss is taken at a step, and their weights, which sum to 1.

    A deeper exit weighs more: block l below the last has `scale * l (l + 1) / 2`, and the last one
    `L - 1` more than the one before it. Its loss is taken at every step; the paper's rotation may
    leave it out. Exits that are no budget of the model are never taken.

    Args:
        curriculum: Which exits are taken, beside the last.
        period: Of `rotational`: every so many blocks, one block further at every step.
        scale: Of all but the last.
        num_blocks: Blocks of the model.
        step: From 0.
        steps: Of the run.

    Source: LayerSkip (Elhoushi et al., 2024); the weights and both curricula are recalled.
    """
    last = num_blocks - 1
    if curriculum == "rotational":
        taken = {block for block in range(last) if block % period == step % period}
    else:
        taken = set(range(max(0, last - 2 * num_blocks * step // max(1, steps)), last))
    taken -= set(range(least_blocks(num_blocks) - 1))
    weights = {block: scale * block * (block + 1) / 2 for block in sorted(taken)}
    weights[last] = max(1, last) + scale * (last - 1) * last / 2
    total = sum(weights.values())
    return {block: weight / total for block, weight in weights.items()}
