"""The Decision Module, fitted to rank the blocks of each prompt as the order of its group does."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from buddy.data.examples import Example
from buddy.drawn import drawn_by
from buddy.model import BuddyForCausalLM
from buddy.routing.decision import DecisionConfig
from buddy.routing.router import Router, RouterConfig
from buddy.training.route.recipe import FitSettings
from buddy.training.summaries import Standard, router_summaries

_BATCH = 16
_VIEWS = 256
"""Views that a step draws."""
_STEEP = 8.0
"""Units of the logistic loss in a deviation of the ranks."""


def rank_scores(order: Sequence[int], num_blocks: int) -> Float[Tensor, " middle"]:
    """Scores of the middle blocks that rank as a removal order does, of mean 0 and deviation 1.

    Args:
        order: Every middle block once, 0-based; the first to go is first.
        num_blocks: How many the model has.
    """
    places = torch.empty(num_blocks - 2, dtype=torch.float64)
    places[torch.tensor(order, dtype=torch.long) - 1] = torch.arange(
        num_blocks - 2, dtype=torch.float64
    )
    centred = places - places.mean()
    return (centred / centred.square().mean().sqrt().clamp(min=1e-12)).float()


def new_router(
    model: BuddyForCausalLM, order: Sequence[int], settings: FitSettings, seed: int
) -> Router:
    """A router that ranks every prompt as an order does, until it is fitted.

    Args:
        model: It is for.
        order: The common removal order, its prior.
        settings: How it is fitted.
        seed: Fixes the first weights.
    """
    config = RouterConfig(
        num_blocks=model.num_blocks,
        token_width=model.backbone.kv_width,
        decision=DecisionConfig(rank=settings.rank, omega=1.0),
    )
    with drawn_by(seed):
        router = Router(config, rank_scores(order, model.num_blocks))
    return router.to(model.device)


def seen_summaries(
    model: BuddyForCausalLM,
    router: Router,
    examples: Sequence[Example],
    parts: Sequence[float] = (0.0, 0.5, 1.0),
) -> Float[Tensor, "parts prompts summary"]:
    """What the router sees of each prompt with parts of its answer.

    Args:
        model: Whose first blocks run.
        router: Says what is read.
        examples: Prompts and answers.
        parts: Shares of the answer: a route may be made again while decoding.
    """
    views = []
    for part in parts:
        seen = [_with_answer(example, part) for example in examples]
        read = [
            router_summaries(model, router, seen[start : start + _BATCH])
            for start in range(0, len(seen), _BATCH)
        ]
        views.append(torch.cat(read).cpu())
    return torch.stack(views)


def seen_prompts(
    model: BuddyForCausalLM, router: Router, examples: Sequence[Example]
) -> Float[Tensor, "prompts summary"]:
    """What the router sees of each prompt before its answer."""
    return seen_summaries(model, router, examples, parts=(0.0,))[0]


def _with_answer(example: Example, share: float) -> Example:
    tokens = int(share * len(example.answer))
    return Example(example.prompt + example.answer[:tokens], example.answer[-1:], example.source)


def fit_router(
    router: Router,
    summaries: Mapping[str, Float[Tensor, "parts prompts summary"]],
    orders: Mapping[str, Sequence[int]],
    settings: FitSettings,
    seed: int,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Fit the ranking: of two blocks, the one that the group's order keeps longer scores higher.

    The loss of a pair is the logistic one, weighted by how near the two are in the order: near ones
    are told apart last, and a depth lies between them as often as between others. Noise on what is
    seen stands for prompts that were not. Every group weighs the same, and prompts alone as much as
    those with parts of their answers.

    Args:
        router: Whose Decision Module is fitted; its prior stays.
        summaries: Those of each group, as `seen_summaries` gives them.
        orders: The order of each group; every middle block once.
        settings: How it is fitted.
        seed: Fixes the noise, and the views that each step draws.
        on_step: Told how many steps are done, of how many.

    Returns:
        Share of the pairs, over views, that the fitted scores order as they should.
    """
    decision, num_blocks = router.decision, router.config.num_blocks
    device = decision.prior.device
    seen = torch.cat([views.flatten(0, 1) for views in summaries.values()])
    standard = Standard.of(seen)
    standardised = standard(seen)
    counts = torch.tensor([views.shape[0] * views.shape[1] for views in summaries.values()])
    group = torch.arange(len(counts)).repeat_interleave(counts)
    weights = torch.cat([_weights(views) for views in summaries.values()]) / len(counts)
    wanted = torch.stack([rank_scores(orders[name], num_blocks) for name in summaries])
    first, second = torch.triu_indices(num_blocks - 2, num_blocks - 2, 1)
    ranked = wanted[:, first] - wanted[:, second]
    signs, near = ranked.sign(), 1 / ranked.abs()
    near /= near.sum(1, keepdim=True)
    draw = torch.Generator().manual_seed(seed)
    decision.cpu().requires_grad_(True)
    optimizer = torch.optim.AdamW(
        decision.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    with torch.enable_grad():
        for step in range(settings.steps):
            drawn = torch.multinomial(weights, _VIEWS, replacement=True, generator=draw)
            noise = torch.randn((_VIEWS, seen.shape[1]), generator=draw)
            scores = decision.fuse(decision(standardised[drawn] + settings.noise * noise))
            apart = (scores[:, first] - scores[:, second]) * signs[group[drawn]]
            loss = (softplus(-_STEEP * apart) * near[group[drawn]]).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
            falling.step()
            on_step(step + 1, settings.steps)
    decision.requires_grad_(False)
    scores = decision.fuse(decision(standardised))
    right = (scores[:, first] - scores[:, second]) * signs[group] > 0
    standard.fold(decision.down)
    decision.to(device)
    return float(right.double().mean(1) @ weights.double())


def _weights(views: Float[Tensor, "parts prompts summary"]) -> Float[Tensor, " views"]:
    """The weight of each view of a group: prompts alone have as much as all parts together."""
    parts, prompts, _ = views.shape
    by_part = torch.full((parts, 1), 0.5 / max(parts - 1, 1))
    by_part[0] = 0.5
    return (by_part / by_part.sum() / prompts).expand(parts, prompts).flatten()
