"""A ledger for a routed model: fitted on answers of every group, and what it gains on others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from buddy.budget.blocks import least_blocks
from buddy.data.examples import Example
from buddy.model import BuddyForCausalLM
from buddy.routing.ledger import Ledger
from buddy.training.answer_losses import Losses
from buddy.training.fast import fast_passes
from buddy.training.ledger.fit import fit_ledger
from buddy.training.ledger.measure import Way, fed, fed_losses, ledger_identity, level_losses
from buddy.training.ledger.recipe import LedgerSettings
from buddy.training.measurements import Measurements
from buddy.training.route.groups import Group


def add_ledger(
    measurements: Measurements,
    routed: BuddyForCausalLM,
    groups: Mapping[str, Group],
    common: Sequence[int],
    depths: Sequence[int],
    rounds: int,
) -> tuple[Ledger | None, dict[str, Any] | None]:
    """A ledger for the plans of a router, and what the record says of it; none if none is asked.

    Args:
        measurements: Measures what is not measured yet.
        routed: The model with its router.
        groups: Answers that it is fitted on, and others.
        common: The removal order of all prompts.
        depths: Means that are checked, in blocks; the lowest level leaves nothing to spend.
        rounds: Blocks that orders were searched for: no token leaves out more.
    """
    run, blocks = measurements.run, routed.num_blocks
    settings = run.recipe.ledger
    if not settings.rows:
        return None, None
    low = max(blocks - rounds, least_blocks(blocks))
    levels = spread_levels(low, blocks, settings.levels)
    rows = [row for group in groups.values() for row in fed(group.fit[: settings.rows])]
    if len(rows) < 4:  # two make a table, and of the prices of the others each half makes sure
        run.warn(["no ledger: fewer than 4 answers have two tokens or more"])
        return None, None
    single = BuddyForCausalLM(
        routed.model, policy=f"static:{','.join(map(str, common))}", kv_policy=routed.kv_policy
    )
    parts = {name: group.check for name, group in groups.items()}
    means = [depth for depth in depths if depth > low]
    with fast_passes(routed.backbone):
        ledger = fit_to_answers(measurements, routed, rows, levels)
        spent = spend_means(measurements, routed, single, ledger, parts, means)
    return ledger, {
        "levels": list(levels),
        "answers": len(rows),
        "known_tokens": ledger.config.tokens,
        "means": [each.to_json() for each in spent],
    }


def spread_levels(low: int, high: int, count: int) -> tuple[int, ...]:
    """So many depths from `low` to `high`, evenly; fewer where blocks are."""
    step = (high - low) / (count - 1)
    return tuple(sorted({round(low + place * step) for place in range(count)}))


def fit_to_answers(
    measurements: Measurements,
    routed: BuddyForCausalLM,
    rows: Sequence[Example],
    levels: Sequence[int],
) -> Ledger:
    """A ledger for a router's plans, prompts at full depth.

    Args:
        measurements: Measures what is not measured yet.
        routed: The model with its router.
        rows: Prompts and answers of two tokens or more, four at least.
        levels: Blocks that a token may run, rising.
    """
    what, prompt = "fitting a ledger", routed.num_blocks
    answers = level_losses(measurements, what, routed, rows, levels, prompt)
    return fit_ledger(answers, LedgerSettings(levels=tuple(levels)))


@dataclass(frozen=True, slots=True)
class Spent:
    """Nats a token where answers run a mean number of blocks, each the mean over sources.

    Attributes:
        mean: Blocks a token.
        prompt: Blocks of the prompts' tokens.
        blocks: Mean blocks a token that ran under `both`.
        single: All tokens at the mean, under one order for all prompts.
        alone: Under that order, spent by the ledger.
        routed: All tokens at the mean, under the router.
        both: Under the router, spent by the ledger.
        alone_gain: What `alone` gains over `single`.
        alone_gain_error: Its paired standard error.
        gain: What `both` gains over `routed`.
        gain_error: Its paired standard error.
    """

    mean: int
    prompt: int
    blocks: float
    single: float
    alone: float
    routed: float
    both: float
    alone_gain: float
    alone_gain_error: float
    gain: float
    gain_error: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def spend_means(
    measurements: Measurements,
    routed: BuddyForCausalLM,
    single: BuddyForCausalLM,
    ledger: Ledger,
    parts: Mapping[str, Sequence[Example]],
    means: Sequence[int],
) -> list[Spent]:
    """What a ledger gains, with prompts at the mean and at full depth.

    Args:
        measurements: Measures what is not measured yet.
        routed: The model with its router.
        single: The same model under one order for all prompts.
        ledger: Spends the means.
        parts: Answers that it was not fitted on, by source; those of one token feed none.
        means: In blocks.
    """
    rows = {name: own for name, some in parts.items() if len(own := fed(some)) > 1}
    cases = [(mean, prompt) for mean in means for prompt in (mean, routed.num_blocks)]
    if not rows or not cases:
        return []
    ways = []
    for (mean, prompt), model in product(cases, (single, routed)):
        spend = ledger.budget(Fraction(mean)).levels
        ways += [Way.level(model, prompt, mean), Way(model, prompt, spend)]
    everyone = [row for some in rows.values() for row in some]
    facts = {
        "cases": [list(case) for case in cases],
        "routed": routed.facts(),
        "single": single.facts(),
        "ledger": ledger_identity(ledger),
    }
    lost = fed_losses(measurements, "checking the ledger", everyone, ways, facts).sum(1)
    tokens = torch.tensor([len(row.answer) - 1 for row in everyone], dtype=torch.float64)
    counts = [len(some) for some in rows.values()]
    found = [
        Losses(*one)
        for one in zip(torch.split(lost, counts), torch.split(tokens, counts), strict=True)
    ]
    ran = {mean: _mean_blocks(rows.values(), ledger, mean) for mean in means}
    return [
        _spent(found, 4 * place, mean, prompt, ran[mean])
        for place, (mean, prompt) in enumerate(cases)
    ]


def _spent(found: Sequence[Losses], first: int, mean: int, prompt: int, blocks: float) -> Spent:
    """One case, of which the four ways begin at a column."""
    means = torch.stack([part.mean[first : first + 4] for part in found]).mean(0).tolist()
    single, alone, routed, both = means

    def gain(over: int, way: int) -> tuple[float, float]:
        pairs = [
            Losses(part.nats[:, [first + over]], part.tokens).behind(part.nats[:, first + way])
            for part in found
        ]
        gains, errors = (torch.cat(column) for column in zip(*pairs, strict=True))
        return float(gains.mean()), float(errors.square().sum().sqrt()) / len(pairs)

    return Spent(mean, prompt, blocks, single, alone, routed, both, *gain(0, 1), *gain(2, 3))


def _mean_blocks(parts: Iterable[Sequence[Example]], ledger: Ledger, mean: int) -> float:
    """Blocks a token that a mean comes to, over sources."""
    spend, shares = ledger.budget(Fraction(mean)).levels, []
    for rows in parts:
        ran = [blocks for row in rows for blocks in spend(row.answer[:-1])]
        shares.append(sum(ran) / len(ran))
    return sum(shares) / len(shares)
