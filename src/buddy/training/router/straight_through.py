"""The training pass: hard plans forward, straight-through gates backward, routes from the prompt.

Every token has a budget of its own, so prompts and answers may run at different depths, and depths
may change within an answer. What a token that skips a block leaves there for later ones is what
decoding under `project` and `lazy` leaves.

A gate multiplies nothing: it adds `(g - value of g) * (what the block did to the residual)`, which
is zero, and whose derivative by `g` is the straight-through gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.plan import DepthPlan, LaneSet
from buddy.depth.policy import DepthPolicy
from buddy.training.batches import Batch
from buddy.training.packing import PackedRun, begin_pass
from buddy.training.router.sharding import ShardedBlocks


@dataclass(frozen=True, slots=True)
class Choice:
    """Plans, and what they leave for the backward pass.

    Attributes:
        plan: What runs.
        gates: [plans, blocks], for the straight-through gradient; None without.
        log_prob: [plans], of sampled plans; None where nothing was sampled.
    """

    plan: DepthPlan
    gates: Float[Tensor, "plans blocks"] | None = None
    log_prob: Float[Tensor, " plans"] | None = None


Choose = Callable[
    [Float[Tensor, "plans blocks"], Int[Tensor, " plans"], Int[Tensor, " plans"]], Choice
]
"""A function from scores, the row of the batch of each, and its budget, to a choice."""


@dataclass(frozen=True, slots=True)
class StraightThroughPass:
    """What a training pass returns.

    Attributes:
        hidden: The residual after the last block.
        lanes_plan: What ran, by token; pads run what the last token of their row does.
        plan: Of each row, what the first token of its answer ran.
        log_prob: Of that plan, where plans were sampled.
    """

    hidden: Float[Tensor, "batch tokens hidden"]
    lanes_plan: DepthPlan
    plan: DepthPlan
    log_prob: Float[Tensor, " batch"] | None


class StraightThroughRun(PackedRun):
    """A pass in which gates get gradients; there are none before `open` names them."""

    _gates: Float[Tensor, "plans blocks"] | None = None
    _plan_of_lane: Int[Tensor, " lanes"]
    _is_dense: bool
    _sharded: ShardedBlocks | None

    def __init__(self, *args: Any, sharded: ShardedBlocks | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sharded = sharded

    def open(
        self,
        gates: Float[Tensor, "plans blocks"] | None,
        plan_of_lane: Int[Tensor, " lanes"],
        *,
        is_dense: bool,
    ) -> None:
        """Go on with gates, once the plans are known.

        Args:
            gates: None where there are none.
            plan_of_lane: By lane, its plan.
            is_dense: Compute skipped blocks too, for their gates' gradients.
        """
        self._gates, self._plan_of_lane, self._is_dense = gates, plan_of_lane, is_dense

    def one_block(self, block: int, run: LaneSet, skip: LaneSet) -> None:
        """Run one block for some lanes, and let its gate see what it did."""
        if self._sharded is not None:
            self.hidden = self._sharded.enter(block, self.hidden)
        self._one_block(block, run, skip)
        if self._sharded is not None:
            self.hidden = self._sharded.leave(block, self.hidden)

    def _one_block(self, block: int, run: LaneSet, skip: LaneSet) -> None:
        if self._gates is None or not self._gates.requires_grad:
            super().one_block(block, run, skip)
            return
        before = self.hidden
        left_undone = self._left_undone(block, skip) if self._is_dense else None
        super().one_block(block, run, skip)
        done = (self.hidden - before).detach()
        if left_undone is not None:
            done = done + left_undone
        gate = self._gates[self._plan_of_lane, block]
        straight = (gate - gate.detach())[:, None].to(done.dtype)
        self.hidden = self.hidden + straight * done

    @torch.no_grad()
    def _left_undone(self, block: int, skip: LaneSet) -> Float[Tensor, "lanes hidden"] | None:
        """What the block would do to the lanes that skip it; zero at others, None without any.

        Only sequences with such a lane are computed.
        """
        if skip is not None and len(skip) == 0:
            return None
        sequence = self.lanes.sequence
        chosen = None if skip is None else np.flatnonzero(np.isin(sequence, sequence[skip]))
        frame = self.frame(chosen, block)
        out = frame.merge(self.hidden, self.run_frame(block, frame, None)) - self.hidden
        if skip is None:
            return out
        skips = torch.zeros(len(sequence), 1, dtype=out.dtype)
        skips[skip] = 1
        return out * skips.to(out.device)


def straight_through_pass(
    backbone: Backbone,
    policy: DepthPolicy,
    batch: Batch,
    depths: Int[Tensor, "batch tokens"],
    choose: Choose,
    *,
    is_dense: bool = False,
    second_from: Int[Tensor, " batch"] | None = None,
    sharded: ShardedBlocks | None = None,
) -> StraightThroughPass:
    """One pass over prompts and answers, routed by the prompts alone.

    Args:
        backbone: The model, adapters included.
        policy: Who scores the blocks.
        batch: Prompts and answers.
        depths: Blocks of each token, first and last included; those of pads do not matter.
        choose: Makes plans and gates of the scores.
        is_dense: Compute skipped blocks too, for their gates' gradients.
        second_from: Columns from which each row follows a second route, chosen from all up to and
            with that token, as decode routes the token it is fed; a row whose column is the width
            has none.
        sharded: The blocks, where processes hold shares of them.
    """
    run = begin_pass(StraightThroughRun, backbone, batch, sharded=sharded)
    run.blocks(range(policy.context_layer), None)
    seen = run.observe(policy.context_layer)
    states = [policy.observe(None, seen)]
    columns = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    route = torch.zeros_like(batch.token_ids)
    if second_from is not None:
        later = columns >= second_from[:, None]
        # Rows without a second route see the same tokens again, and so choose the same.
        fed = columns <= second_from[:, None]  # decode sees the token that it routes
        sees = torch.where(later.any(1, keepdim=True), fed, batch.is_prompt)
        states.append(policy.observe(None, replace(seen, router_sees=sees)))
        route = later.long()
    depths = _pads_follow(batch, depths)
    kinds, place = _distinct(run.lanes.sequence, route, depths)
    rows, routes, budgets = kinds.to(depths.device)
    scores = _scores(policy, states, rows, routes, budgets)
    choice = choose(scores, rows, budgets)
    run.open(choice.gates, torch.from_numpy(place).to(depths.device), is_dense=is_dense)
    plan = choice.plan.select(place)
    run.blocks(range(policy.context_layer, backbone.num_blocks), plan)
    # By row, the first token after the prompt: the prompt may run at a depth of its own.
    after = batch.is_prompt.sum(1).clamp(max=len(columns) - 1).cpu().numpy()
    first = place[run.lanes.first + after]
    return StraightThroughPass(
        hidden=run.hidden.view(*batch.token_ids.shape, -1),
        lanes_plan=plan,
        plan=choice.plan.select(first),
        log_prob=None if choice.log_prob is None else choice.log_prob[torch.from_numpy(first)],
    )


def _pads_follow(batch: Batch, depths: Int[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """Pads at the depth of the last token that predicts, so that they make no plan of their own."""
    column = torch.arange(depths.shape[1], device=depths.device)
    return depths.gather(1, torch.minimum(column, batch.lengths[:, None] - 2))


def _distinct(
    sequence: NDArray[np.int64],
    route: Int[Tensor, "batch tokens"],
    depths: Int[Tensor, "batch tokens"],
) -> tuple[Int[Tensor, "3 plans"], NDArray[np.int64]]:
    """Each (row, route, budget) once, and by lane which of them it is."""
    keys = np.stack([sequence, route.flatten().cpu().numpy(), depths.flatten().cpu().numpy()], 1)
    kinds, place = np.unique(keys, axis=0, return_inverse=True)
    return torch.from_numpy(np.ascontiguousarray(kinds.T)), place.ravel()


def _scores(
    policy: DepthPolicy,
    states: list[Any],
    rows: Int[Tensor, " plans"],
    routes: Int[Tensor, " plans"],
    budgets: Int[Tensor, " plans"],
) -> Float[Tensor, "plans blocks"]:
    by_route = [policy.scores(state.select_rows(rows), budgets) for state in states]
    if len(by_route) == 1:
        return by_route[0]
    first, second = by_route
    return torch.where(routes[:, None] == 0, first, second)
