"""What routing gains: the same answers under the prior, each single order, and the router."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from buddy.data.examples import Example
from buddy.depth.select import select_blocks
from buddy.routing.router import Router
from buddy.training.answer_losses import Losses
from buddy.training.route.fit import seen_prompts
from buddy.training.route.groups import COMMON, FULL, PRIOR, ROUTED, Group
from buddy.training.route.measurements import SetMeasurements


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


def check_router(
    measurements: SetMeasurements,
    router: Router,
    depths: Sequence[int],
    groups: Mapping[str, Group],
    strangers: Mapping[str, Sequence[Example]],
    orders: Mapping[str, Sequence[int]],
    own: Mapping[str, str],
    prior: Sequence[int],
) -> dict[str, list[Compared]]:
    """The table of the groups, and that of rows that belong to none: an entry for each depth.

    Args:
        measurements: Measures what is not measured yet.
        router: What was fitted.
        depths: In blocks.
        groups: Whose rows for the check are compared.
        strangers: Rows of no group, by source.
        orders: Removal orders, by whose they are.
        own: Whose order each group has.
        prior: The order that the model has without a router.
    """
    parts = {**{name: group.check for name, group in groups.items()}, **strangers}
    examples = [row for rows in parts.values() for row in rows]
    blocks = measurements.model.num_blocks
    columns, fixed = order_sets({PRIOR: prior, **orders}, depths, blocks)
    routed = _routed_sets(measurements, router, depths, examples)
    whole = torch.ones(len(examples), 1, blocks, dtype=torch.bool)
    columns += [(FULL, blocks), *((ROUTED, depth) for depth in depths)]
    known = torch.cat([fixed.expand(len(examples), -1, -1), whole], 1)
    lost = measurements.losses("checking orders", examples, known)
    chosen = _losses_of_routed(measurements, examples, routed, known, lost)
    lost = Losses(torch.cat([lost.nats, chosen], 1), lost.tokens)
    places, start = dict[str, range](), 0
    for name, rows in parts.items():
        places[name] = range(start, start := start + len(rows))

    def table(names: Sequence[str]) -> list[Compared]:
        by_name = {n: Losses(lost.nats[places[n]], lost.tokens[places[n]]) for n in names}
        everyone = [place for n in names for place in places[n]]
        return [
            compare(by_name, columns, depth, own, routed[everyone, at])
            for at, depth in enumerate(depths)
        ]

    tables = {"groups": table(list(groups))}
    if strangers:
        tables["others"] = table(list(strangers))
    return tables


def _losses_of_routed(
    measurements: SetMeasurements,
    examples: Sequence[Example],
    routed: Bool[Tensor, "rows depths blocks"],
    known: Bool[Tensor, "rows sets blocks"],
    lost: Losses,
) -> Float[Tensor, "rows depths"]:
    """Nats under the router's sets; most are those of an order, which have been measured."""
    same = (routed[:, :, None] == known[:, None]).all(-1)
    nats = lost.nats.gather(1, same.int().argmax(-1))
    new = (~same.any(-1)).any(1).nonzero()[:, 0].tolist()
    if new:
        some = [examples[place] for place in new]
        nats[new] = measurements.losses("checking the router", some, routed[new]).nats
    return nats


def _routed_sets(
    measurements: SetMeasurements,
    router: Router,
    depths: Sequence[int],
    examples: Sequence[Example],
) -> Bool[Tensor, "answers depths blocks"]:
    """What the router chooses for each prompt."""
    seen = seen_prompts(measurements.model, router, examples)
    summaries = seen.to(router.decision.prior.device)
    scores = pad(router.decision.fuse(router.decision(summaries)), (1, 1))
    sets = [
        select_blocks(scores, torch.full((len(examples),), depth)).mask.cpu() for depth in depths
    ]
    return torch.stack(sets, 1)


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
