"""Which blocks a model would run: for a prompt, and again at every token of its answer."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from buddy.data.examples import Example
from buddy.depth.policy import DepthPolicy, Observation
from buddy.depth.select import select_blocks
from buddy.model import BuddyForCausalLM

Plan = tuple[int, ...]


@torch.inference_mode()
def routes_of(
    model: BuddyForCausalLM, example: Example, depths: Sequence[int], *, answer_tokens: int
) -> list[list[Plan]]:
    """The plans of a prompt, and of each token of the answer as it is fed.

    From token ids alone where the policy has a token table; else the model runs.

    Args:
        model: Whose policy chooses.
        example: Prompt and answer.
        depths: Budgets in blocks.
        answer_tokens: Of the answer, at most; 0 asks for the prompt's plan alone.

    Returns:
        By depth, the prompt's plan and one for each answer token.
    """
    policy = model.inference_policy()
    pieces = [example.prompt, *((token,) for token in example.answer[:answer_tokens])]
    if isinstance(policy, DepthPolicy) and policy.plans_ahead:
        return _from_ids(policy, pieces, depths, model.device)
    return [routes_by_running(model, pieces, depth) for depth in depths]


def _from_ids(
    policy: DepthPolicy,
    pieces: Sequence[tuple[int, ...]],
    depths: Sequence[int],
    device: torch.device,
) -> list[list[Plan]]:
    budgets = torch.tensor(depths, device=device)
    state: Any = None
    routes: list[list[Plan]] = [[] for _ in depths]
    for piece in pieces:
        ids = torch.tensor([piece], device=device)
        state = policy.observe(state, Observation(ids, torch.ones_like(ids, dtype=torch.bool)))
        scores = policy.scores(state, budgets[:1]).expand(len(depths), -1)
        plans = select_blocks(scores, budgets, pinned=policy.pinned).executed_sets
        for own, plan in zip(routes, plans, strict=True):
            own.append(plan)
    return routes


@torch.inference_mode()
def routes_by_running(
    model: BuddyForCausalLM, pieces: Sequence[tuple[int, ...]], depth: int
) -> list[Plan]:
    """Plans as `routes_of` gives them at one depth, from what really ran."""
    session: Any = None
    routes = []
    for piece in pieces:
        out: Any = model(
            torch.tensor([piece], device=model.device),
            budget=f"{depth} blocks",
            cache=session,
            use_cache=True,
            logits_to_keep=1,
        )
        session = out.cache
        routes.append(cast(Plan, out.plan.executed_sets[0]))
    return routes
