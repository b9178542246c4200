"""What routing gains: the same answers under the prior, each single order, and the router."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.training.route.groups import COMMON, FULL, PRIOR, ROUTED
from buddy.training.route.losses import Losses


@dataclass(frozen=True, slots=True)
class Compared:
    """Nats a token at one depth, each the mean over sources.

    Attributes:
        blocks: How many run.
        full: The loss at full depth.
        prior: By the order that the model has without a router.
        searched: By the order that was searched on all prompts.
        single: By the best single order for all, chosen in hindsight: by these very answers.
        single_name: Whose order that is.
        routed: By the router.
        known: By the order of each prompt's own group, if it were told.
        hindsight: By the best order for each answer, by that very answer.
        gain: What `routed` gains over `single`.
        gain_error: Its paired standard error.
        prior_gain: What `routed` gains over `prior`.
        prior_gain_error: Its paired standard error.
        searched_gain: What `routed` gains over `searched`.
        searched_gain_error: Its paired standard error.
        distinct_plans: Sets of blocks among the routed answers.
        by_source: For each source: answers, tokens, the figures above, and `wrong`, what the worst
            other group's order costs more than its own.
    """

    blocks: int
    full: float
    prior: float
    searched: float
    single: float
    single_name: str
    routed: float
    known: float
    hindsight: float
    gain: float
    gain_error: float
    prior_gain: float
    prior_gain_error: float
    searched_gain: float
    searched_gain_error: float
    distinct_plans: int
    by_source: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def order_sets(
    orders: Mapping[str, Sequence[int]], depths: Sequence[int], num_blocks: int
) -> tuple[list[tuple[str, int]], Bool[Tensor, "sets blocks"]]:
    """The set of each order at each depth, and what each is of: (order, blocks)."""
    names = [(name, blocks) for name in orders for blocks in depths]
    sets = torch.ones(len(names), num_blocks, dtype=torch.bool)
    for row, (name, blocks) in enumerate(names):
        sets[row, list(orders[name][: num_blocks - blocks])] = False
    return names, sets


def compare(
    losses: Mapping[str, Losses],
    columns: Sequence[tuple[str, int]],
    blocks: int,
    group_of: Mapping[str, str],
    plans: Bool[Tensor, "answers blocks"],
) -> Compared:
    """Compare the ways to choose blocks at one depth.

    Args:
        losses: Those of the answers of each source, one column for each of `columns`.
        columns: (way, blocks): full depth, the prior, each order by its name, the router.
        blocks: The depth.
        group_of: The order that each source's prompts are to have; none where it was never searched
            on.
        plans: Routed sets of all answers at this depth.
    """
    at = {name: place for place, (name, depth) in enumerate(columns) if depth == blocks}
    orders = [name for name in at if name not in (PRIOR, ROUTED)]
    whole = [name for name, _ in columns].index(FULL)
    means = {
        name: torch.stack([part.mean[place] for part in losses.values()]).mean()
        for name, place in at.items()
    }
    single = min(orders, key=lambda name: float(means[name]))
    by_source = {}
    for source, part in losses.items():
        own = group_of.get(source)
        row: dict[str, Any] = {
            "answers": len(part.tokens),
            "tokens": int(part.tokens.sum()),
            "full": float(part.mean[whole]),
            "prior": float(part.mean[at[PRIOR]]),
            "searched": float(part.mean[at[COMMON]]),
            "single": float(part.mean[at[single]]),
            "routed": float(part.mean[at[ROUTED]]),
            "known": float(part.mean[at[own or single]]),
            "hindsight": _hindsight(part, [at[name] for name in orders]),
        }
        ways = {"gain": single, "prior_gain": PRIOR, "searched_gain": COMMON}
        for name, way in ways.items():
            behind, error = Losses(part.nats[:, at[way], None], part.tokens).behind(
                part.nats[:, at[ROUTED]]
            )
            row |= {name: float(behind), f"{name}_error": float(error)}
        others = [float(part.mean[at[name]]) for name in orders if name != own]
        row["wrong"] = max(others) - row["known"] if own is not None and others else None
        by_source[source] = row
    count = len(by_source)
    figures = {
        name: sum(row[name] for row in by_source.values()) / count
        for name in (
            "full",
            "prior",
            "searched",
            "single",
            "routed",
            "known",
            "hindsight",
            "gain",
            "prior_gain",
            "searched_gain",
        )
    }
    errors = {
        name: sum(row[name] ** 2 for row in by_source.values()) ** 0.5 / count
        for name in ("gain_error", "prior_gain_error", "searched_gain_error")
    }
    return Compared(
        blocks=blocks,
        single_name=single,
        distinct_plans=len(torch.unique(plans, dim=0)),
        by_source=by_source,
        **figures,
        **errors,
    )


def _hindsight(part: Losses, places: Sequence[int]) -> float:
    chosen: Float[Tensor, " answers"] = part.nats[:, list(places)].amin(1)
    return float(chosen.sum() / part.tokens.sum())
