"""Plans of prompts, made before any of it is fed, so that a prompt may be fed in parts.

A policy that needs no block to have run knows a prompt's plan from its tokens. The plan is that of
a prefill in one pass; so is the cache, whatever parts the prompt is fed in.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.policy import DepthPolicy, Observation, Policy
from buddy.depth.select import select_blocks
from buddy.engine.state.sequence import RouteRow
from buddy.errors import PolicyError


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """What a policy makes of a prompt that is still to be fed.

    Attributes:
        block_mask: [blocks], which blocks each of its tokens runs.
        route: What the policy remembers once all of it has been fed.
    """

    block_mask: NDArray[np.bool_]
    route: RouteRow


@torch.no_grad()
def plan_prompt(policy: Policy, token_ids: Int[Tensor, " tokens"], blocks: int) -> PlannedPrompt:
    """The plan of a prompt by its own scores, as a prefill in one pass would make it.

    Args:
        policy: One that `plans_ahead`.
        token_ids: The whole prompt; the route sees all of it.
        blocks: Budget of each of its tokens.

    Raises:
        BudgetError: The budget cannot be spent.
        PolicyError: The policy knows no plan before blocks have run.
    """
    if not isinstance(policy, DepthPolicy) or not policy.plans_ahead:
        raise PolicyError(
            f"policy {policy.name!r} plans while blocks run: feed its prompts in one pass"
        )
    policy.check_spendable({blocks})
    seen = Observation(token_ids[None], torch.ones_like(token_ids[None], dtype=torch.bool))
    state = policy.observe(None, seen)
    route = RouteRow(state, 0, 1)
    if blocks == policy.num_blocks:
        return PlannedPrompt(np.ones(blocks, np.bool_), route)
    budget = torch.tensor([blocks], device=token_ids.device)
    plan = select_blocks(policy.scores(state, budget), budget, pinned=policy.pinned)
    return PlannedPrompt(plan.host[0], route)
