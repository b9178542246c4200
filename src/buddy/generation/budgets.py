"""What a caller's budgets come to, in blocks: named ones as they are, `auto` from the prompt."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.blocks import Budget
from buddy.budget.read import (
    AUTO,
    BudgetLike,
    check_mean,
    no_predictor,
    parse_budget,
    parse_budgets,
    read_mean,
)
from buddy.budget.source import (
    BudgetSource,
    CalledBudget,
    ConstantBudget,
    PhasedBudget,
    Progress,
)
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.state.cache import PassingKV
from buddy.engine.state.lanes import Lanes
from buddy.engine.step import Feed
from buddy.errors import BudgetError, PolicyError
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.ledger import Ledger, LedgerBudget
from buddy.routing.router import Router

OneBudget = BudgetLike | BudgetSource | Callable[[Progress], BudgetLike]
"""A budget as a caller writes it, a source, or a callable that is asked at every step."""

Budgets = OneBudget | Sequence[OneBudget] | Tensor
"""One budget for all rows, one per row, or a tensor [rows] of block counts."""


Numbers = BudgetLike | Sequence[BudgetLike] | Tensor
"""Budgets that can be read before any step."""


def read_budgets(budget: Numbers | None, num_blocks: int, batch: int) -> tuple[int | None, ...]:
    """Blocks that each row runs; None where the Budget Predictor is to choose.

    Raises:
        BudgetError: A budget cannot be read or spent.
    """
    if budget is None:
        return (num_blocks,) * batch
    if isinstance(budget, Tensor) and budget.ndim > 0:
        budget = [f"{blocks} blocks" for blocks in budget.reshape(-1).tolist()]
    parsed = parse_budgets(budget, num_blocks, batch)
    return tuple(None if one == AUTO else one.blocks for one in parsed)


def read_prefill_budget(budget: BudgetLike, num_blocks: int) -> int:
    """Blocks that the tokens of a prompt run.

    Raises:
        BudgetError: It is no number.
    """
    parsed = parse_budget(budget, num_blocks)
    if parsed == AUTO:
        raise BudgetError(
            "prefill_budget must be a number such as 1.0 or \"24 blocks\", got 'auto': the "
            "predictor chooses one budget for prompt and answer"
        )
    return parsed.blocks


def _as_source(given: object, blocks: int | None) -> BudgetSource | None:
    """What was given, or a constant; None where the predictor is to choose."""
    if given is None:
        return None if blocks is None else ConstantBudget(blocks)
    return given if isinstance(given, BudgetSource) else CalledBudget(cast(Any, given))


def _is_source(budget: object) -> bool:
    return not isinstance(budget, Budget) and (isinstance(budget, BudgetSource) or callable(budget))


def check_predictor(predictor: BudgetPredictor | None, router: Router | None) -> None:
    """Refuse a predictor that reads what this model's router does not.

    Raises:
        PolicyError: The predictor was made for another router, or there is none.
    """
    if predictor is None:
        return
    if router is None:
        raise PolicyError("a Budget Predictor reads the router's summary: give the router too")
    if predictor.router_config != router.config:
        raise PolicyError(
            f"the Budget Predictor was made for a router with {predictor.router_config} and this "
            f"one has {router.config}: train a predictor for this router"
        )


class BudgetReader:
    """The part of a model that turns budgets into blocks."""

    backbone: Backbone
    router: Router | None
    predictor: BudgetPredictor | None
    ledger: Ledger | None

    def read_budgets(self, budget: Numbers | None, batch: int) -> tuple[int | None, ...]:
        """Blocks that each row runs; None where the predictor is to choose.

        Raises:
            BudgetError: A budget cannot be read, or needs a predictor that is not there.
        """
        wanted = read_budgets(budget, self.backbone.num_blocks, batch)
        if None in wanted and self.predictor is None:
            raise no_predictor()
        return wanted

    def read_sources(
        self, budget: Budgets | None, prefill_budget: BudgetLike | None, batch: int
    ) -> tuple[BudgetSource | None, ...]:
        """Each row's source of budgets; None where the predictor is to choose.

        Raises:
            BudgetError: A budget cannot be read, or needs a predictor that is not there.
        """
        num_blocks = self.backbone.num_blocks
        is_list = isinstance(budget, Sequence) and not isinstance(budget, str)
        rows = list(cast(Sequence[object], budget)) if is_list else [budget]
        rows = [self.ledger_budget(one) or one for one in rows]
        called = [one if _is_source(one) else None for one in rows]
        plain: Any = [Budget.full(num_blocks) if _is_source(one) else one for one in rows]
        wanted = self.read_budgets(plain if is_list else plain[0], batch)
        called = called if is_list else called * batch
        made = [_as_source(source, blocks) for source, blocks in zip(called, wanted, strict=True)]
        if prefill_budget is None:
            return tuple(made)
        prompt = read_prefill_budget(prefill_budget, num_blocks)
        if None in made:
            raise BudgetError(
                "budget 'auto' is chosen for prompt and answer together: leave prefill_budget out, "
                "or name the budget"
            )
        return tuple(PhasedBudget(prompt, one) for one in made if one is not None)

    def ledger_budget(self, budget: object) -> LedgerBudget | None:
        """What spends a mean; None where another budget is asked for.

        Raises:
            BudgetError: The model's ledger cannot spend it, or there is none.
        """
        read = read_mean(budget)
        if read is None:
            return None
        mean = read.blocks(self.backbone.num_blocks)
        check_mean(mean, None if self.ledger is None else self.ledger.range)
        assert self.ledger is not None
        return self.ledger.budget(mean)

    def choose_sources(
        self,
        wanted: Sequence[BudgetSource | None],
        token_ids: Int[Tensor, "batch tokens"],
        valid: Bool[Tensor, "batch tokens"],
        router_sees: Bool[Tensor, "batch tokens"],
    ) -> tuple[BudgetSource, ...]:
        """Let the predictor choose for the rows that name no budget, each from its own prompt."""
        if None not in wanted:
            return tuple(one for one in wanted if one is not None)
        asked = tuple(None if one is None else 1 for one in wanted)
        chosen = self.choose_budgets(asked, token_ids, valid, router_sees)
        return tuple(
            ConstantBudget(blocks) if one is None else one
            for one, blocks in zip(wanted, chosen, strict=True)
        )

    def resolve_budgets(self, budget: Numbers | None, batch: int) -> tuple[int, ...]:
        """Blocks that each row runs, where there is no prompt that could decide.

        Raises:
            BudgetError: A budget cannot be read, or is `auto`.
        """
        wanted = self.read_budgets(budget, batch)
        if None in wanted:
            raise BudgetError(
                "budget 'auto' is chosen for each prompt, and one for all is needed here: "
                'name a budget such as 0.75 or "18 blocks"'
            )
        return tuple(blocks for blocks in wanted if blocks is not None)

    def choose_budgets(
        self,
        wanted: Sequence[int | None],
        token_ids: Int[Tensor, "batch tokens"],
        valid: Bool[Tensor, "batch tokens"],
        router_sees: Bool[Tensor, "batch tokens"],
    ) -> tuple[int, ...]:
        """Let the predictor choose for the rows that name no budget, each from its own prompt.

        Args:
            wanted: As `read_budgets` gives it.
            token_ids: Prompts, and whatever follows them.
            valid: False for pads.
            router_sees: Tokens that the choice may depend on.
        """
        rows = [row for row, blocks in enumerate(wanted) if blocks is None]
        chosen: list[int] = []
        if rows:
            assert self.router is not None
            assert self.predictor is not None
            summary = read_summary(
                self.backbone, self.router, token_ids[rows], valid[rows], router_sees[rows]
            )
            chosen = self.predictor.choose(summary).tolist()
        by_row = dict(zip(rows, chosen, strict=True))
        return tuple(by_row[row] if named is None else named for row, named in enumerate(wanted))


@torch.no_grad()
def read_summary(
    backbone: Backbone,
    router: Router,
    token_ids: Int[Tensor, "batch tokens"],
    valid: Bool[Tensor, "batch tokens"],
    router_sees: Bool[Tensor, "batch tokens"],
) -> Float[Tensor, "batch summary"]:
    """The router's summary of these tokens, before any of them is fed.

    The context layer is not run: its keys and values are projected from the residual before it.

    Args:
        backbone: Its blocks before the context layer run.
        router: Says what is read.
        token_ids: Prompts, and whatever follows them.
        valid: False for pads.
        router_sees: Tokens that the summary may see; a subset of `valid`.
    """
    feed = Feed.of_batch(token_ids, valid, router_sees)
    lanes = Lanes.prompts(feed.counts, token_ids.device)
    kv = PassingKV(backbone.project, lanes)
    run = BlockRun(backbone, lanes, kv, feed.token_ids, feed.router_sees)
    layer = router.config.planner.context_layer - 1
    run.blocks(range(layer), None)
    positions = torch.from_numpy(lanes.slot).long().to(token_ids.device)
    keys, values = (
        lanes.whole.spread(made.flatten(1))
        for made in backbone.project(layer, run.hidden, positions)
    )
    return router.summary(router.observe(None, replace(run.observe(0), keys=keys, values=values)))
