"""What a caller's budgets come to in a model: sources of blocks, `auto` chosen from the prompt."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.blocks import least_blocks
from buddy.budget.request import BudgetLike, BudgetRequest, read_blocks, read_budget
from buddy.budget.resolved import Limits
from buddy.budget.source import BudgetSource, ConstantBudget
from buddy.budget.thinking import ThinkingMarks
from buddy.depth.policy import Policy
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.feed import Feed
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.passing import PassingKV
from buddy.errors import BudgetError, PolicyError
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.ledger import Ledger
from buddy.routing.router import Router

Budgets = BudgetLike | Sequence[BudgetLike] | Tensor
"""One budget for all rows, one per row, or a tensor [rows] of block counts."""


def read_rows(budget: Any, batch: int) -> list[BudgetRequest]:
    """The budget of each row.

    Raises:
        BudgetError: A budget cannot be read, or there is another number of them.
    """
    if isinstance(budget, Tensor) and budget.ndim > 0:
        budget = [f"{blocks} blocks" for blocks in budget.reshape(-1).tolist()]
    if isinstance(budget, str) or not isinstance(budget, Sequence):
        return [read_budget(budget)] * batch
    if len(budget) != batch:
        raise BudgetError(
            f"got {len(budget)} budgets for a batch of {batch} rows: "
            "give one budget per row, or a single budget for all"
        )
    return [read_budget(row_budget) for row_budget in budget]


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

    @property
    @abstractmethod
    def thinking_marks(self) -> ThinkingMarks | None:
        """The marks around what it thinks aloud; None where there are none."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """Who chooses the blocks."""

    @property
    def limits(self) -> Limits:
        """What budgets it can spend."""
        num_blocks = self.backbone.num_blocks
        return Limits(
            num_blocks=num_blocks,
            least=least_blocks(num_blocks, self.policy.num_pinned),
            has_predictor=self.predictor is not None,
            means=None if self.ledger is None else self.ledger.range,
            find_marks=lambda: self.thinking_marks,
        )

    def read_sources(
        self, budget: Budgets | None, prefill_budget: BudgetLike | None, batch: int
    ) -> tuple[BudgetSource | None, ...]:
        """Each row's source of budgets; None where the predictor is to choose.

        Raises:
            BudgetError: A budget cannot be read, or needs a predictor that is not there.
        """
        prompt = None if prefill_budget is None else read_blocks(prefill_budget, "prefill_budget")
        limits = self.limits
        requests = [request.with_prefill(prompt) for request in read_rows(budget, batch)]
        return tuple(request.resolve(limits).source(self.ledger) for request in requests)

    def choose_sources(
        self,
        wanted: Sequence[BudgetSource | None],
        token_ids: Int[Tensor, "batch tokens"],
        valid: Bool[Tensor, "batch tokens"],
        router_sees: Bool[Tensor, "batch tokens"],
    ) -> tuple[BudgetSource, ...]:
        """Let the predictor choose for the rows that name no budget, each from its own prompt."""
        if None not in wanted:
            return tuple(source for source in wanted if source is not None)
        rows = [row for row, source in enumerate(wanted) if source is None]
        chosen = iter(self.choose_budgets(token_ids[rows], valid[rows], router_sees[rows]))
        return tuple(
            ConstantBudget(next(chosen)) if source is None else source for source in wanted
        )

    def choose_budgets(
        self,
        token_ids: Int[Tensor, "batch tokens"],
        valid: Bool[Tensor, "batch tokens"],
        router_sees: Bool[Tensor, "batch tokens"],
    ) -> list[int]:
        """Blocks that the predictor chooses for each row, from its own prompt.

        Args:
            token_ids: Prompts, and whatever follows them.
            valid: False for pads.
            router_sees: Tokens that the choice may depend on.
        """
        assert self.router is not None
        assert self.predictor is not None
        summary = read_summary(self.backbone, self.router, token_ids, valid, router_sees)
        return [int(blocks) for blocks in self.predictor.choose(summary).tolist()]


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
        lanes.whole.spread(projected.flatten(1))
        for projected in backbone.project(layer, run.hidden, positions)
    )
    return router.summary(router.observe(None, replace(run.observe(0), keys=keys, values=values)))
