"""The one place where scores become a plan: every policy's strictness is proved here."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from buddy.budget.blocks import check_spendable
from buddy.depth.plan import DepthPlan
from buddy.errors import PolicyError


def select_blocks(
    scores: Float[Tensor, "batch blocks"],
    blocks: Int[Tensor, " batch"],
    *,
    pinned: Sequence[int] = (0, -1),
) -> DepthPlan:
    """Keep each row's highest-scoring blocks, exactly as many as its budget.

    Ties go to the shallower block, so equal scores give equal plans everywhere.

    Args:
        scores: Unnormalised; higher is kept. NaN is an error, infinities are not.
        blocks: Budget of each row in blocks, pinned ones included.
        pinned: Blocks that always run: the first feeds the router, the last the head.

    Returns:
        Plan with a lane for each row, `blocks[row]` True in each; on the device of `blocks`.

    Raises:
        BudgetError: A budget is smaller than the number of pinned blocks, or too large.
        PolicyError: A score is NaN.

    Source: paper, section 4.2.1 (top-k); the tie rule is ours.
    """
    num_blocks = scores.shape[1]
    budgets = blocks.tolist()
    check_spendable(budgets, num_blocks, pinned)
    always = {block % num_blocks for block in pinned}
    free = [block for block in range(num_blocks) if block not in always]
    # On the host, where a plan is carried out, and in plain Python: a row has a few dozen scores.
    lanes: list[list[bool]] = []
    for row, keep in zip(scores.tolist(), budgets, strict=True):
        if any(score != score for score in row):
            raise PolicyError(
                "a block score is NaN, so no block can be ranked: the router's weights or its "
                "input are broken; load another checkpoint or use --policy static"
            )
        # A stable sort leaves ties in their order, the shallower block first.
        ranked = sorted(free, key=row.__getitem__, reverse=True)
        chosen = {*always, *ranked[: keep - len(always)]}
        lanes.append([block in chosen for block in range(num_blocks)])
    return DepthPlan.of_lanes(lanes, blocks.device)
