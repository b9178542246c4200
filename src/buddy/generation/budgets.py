"""What a caller's budgets come to, in blocks: named ones as they are, `auto` from the prompt."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.budget import AUTO, BudgetLike, parse_budgets
from buddy.depth.policy import Observation
from buddy.engine.run import BlockRun
from buddy.engine.state.cache import PassingKV
from buddy.engine.state.timeline import Timeline
from buddy.errors import BudgetError, PolicyError
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.router import Router

Budgets = BudgetLike | Sequence[BudgetLike] | Tensor
"""One budget for all rows, one per row, or a tensor of block counts per row."""


def read_budgets(budget: Budgets | None, num_blocks: int, batch: int) -> tuple[int | None, ...]:
    """Blocks that each row runs; None where the Budget Predictor is to choose.

    Raises:
        BudgetError: A budget cannot be read or spent.
    """
    if budget is None:
        return (num_blocks,) * batch
    if isinstance(budget, Tensor):
        budget = [f"{blocks} blocks" for blocks in budget.reshape(-1).tolist()]
    parsed = parse_budgets(budget, num_blocks, batch)
    return tuple(None if one == AUTO else one.blocks for one in parsed)


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

    def read_budgets(self, budget: Budgets | None, batch: int) -> tuple[int | None, ...]:
        """Blocks that each row runs; None where the predictor is to choose.

        Raises:
            BudgetError: A budget cannot be read, or needs a predictor that is not there.
        """
        wanted = read_budgets(budget, self.backbone.num_blocks, batch)
        if None in wanted and self.predictor is None:
            raise BudgetError(
                "budget 'auto' needs a trained Budget Predictor and this model has none: "
                'name a budget such as 0.75 or "18 blocks"'
            )
        return wanted

    def resolve_budgets(self, budget: Budgets | None, batch: int) -> tuple[int, ...]:
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
        counted: Bool[Tensor, "batch tokens"],
    ) -> tuple[int, ...]:
        """Let the predictor choose for the rows that name no budget, each from its own prompt.

        Args:
            wanted: As `read_budgets` gives it.
            token_ids: Prompts, and whatever follows them.
            valid: False for pads.
            counted: Tokens that the choice may depend on.
        """
        rows = [row for row, blocks in enumerate(wanted) if blocks is None]
        chosen: list[int] = []
        if rows:
            assert self.router is not None
            assert self.predictor is not None
            summary = read_summary(
                self.backbone, self.router, token_ids[rows], valid[rows], counted[rows]
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
    counted: Bool[Tensor, "batch tokens"],
) -> Float[Tensor, "batch summary"]:
    """The router's summary of these tokens, before any of them is fed.

    The context layer is not run: its keys and values are projected from the residual before it.

    Args:
        backbone: Its blocks before the context layer run.
        router: Says what is read.
        token_ids: Prompts, and whatever follows them.
        valid: False for pads.
        counted: Tokens that the summary may see; a subset of `valid`.
    """
    timeline = Timeline(len(valid), valid.shape[1], valid.device)
    timeline.extend(valid)
    layer = router.config.planner.context_layer - 1
    run = BlockRun(backbone, timeline, PassingKV(), token_ids)
    run.blocks(range(layer), None)
    positions = timeline.new_positions.flatten()
    keys, values = backbone.project(layer, run.hidden.flatten(0, 1), positions)
    shape = (*token_ids.shape, -1)
    seen = Observation(token_ids, counted, keys.reshape(shape), values.reshape(shape))
    return router.summary(router.observe(None, seen))
