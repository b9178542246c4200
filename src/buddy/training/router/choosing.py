"""How a training step turns scores into plans, gates and log-probabilities."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from buddy.depth.policy import DepthPolicy
from buddy.depth.select import select_blocks
from buddy.training.router.recipe import RouterSettings
from buddy.training.router.relaxation import gumbel_noise, make_gates, plan_log_prob
from buddy.training.router.straight_through import Choice, Choose


def plain_choice(policy: DepthPolicy) -> Choose:
    """The choice of inference: the highest scores, no gates."""
    return lambda scores, rows, budgets: Choice(
        select_blocks(scores, budgets, pinned=policy.pinned)
    )


def training_choice(
    settings: RouterSettings, policy: DepthPolicy, *, places: Sequence[int], seed: int
) -> Choose:
    """The choice that the recipe names: gates of a relaxation, sampled plans, or plans alone.

    Args:
        settings: Of the router.
        policy: Whose scores come; gates are for its blocks that are not pinned.
        places: Of the rows in the whole batch, over all processes.
        seed: Of the step's noise; plans of one row share theirs.
    """
    if settings.policy != "routed" or settings.method == "measured":
        return plain_choice(policy)
    free = free_blocks(policy)
    samples = settings.method == "policy-gradient"
    gates = make_gates(settings.relaxation, settings.temperature)

    def choose(
        scores: Float[Tensor, "plans blocks"],
        rows: Int[Tensor, " plans"],
        budgets: Int[Tensor, " plans"],
    ) -> Choice:
        ours = scores[:, free]
        noisy = ours
        if samples or settings.relaxation == "gumbel":
            noise = gumbel_noise(places, len(free), seed=seed).to(ours.device)
            noisy = ours / settings.temperature + noise[rows]
        plan = select_blocks(_spread(noisy, free, policy.num_blocks), budgets, pinned=policy.pinned)
        is_kept = plan.mask[:, free]
        if samples:
            log_prob = plan_log_prob(ours / settings.temperature, noisy, is_kept)
            return Choice(plan, log_prob=log_prob)
        return Choice(plan, gates=_spread(gates(noisy, is_kept), free, policy.num_blocks))

    return choose


def free_blocks(policy: DepthPolicy) -> list[int]:
    """The blocks that a plan may skip; they are neighbours."""
    pinned = {block % policy.num_blocks for block in policy.pinned}
    return [block for block in range(policy.num_blocks) if block not in pinned]


def _spread(
    values: Float[Tensor, "batch free"], free: Sequence[int], num_blocks: int
) -> Float[Tensor, "batch blocks"]:
    """Values of some adjacent blocks among all blocks, zero elsewhere."""
    return pad(values, (free[0], num_blocks - 1 - free[-1]))
