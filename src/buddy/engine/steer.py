"""Steering: who runs each block, and when it is asked.

One loop serves methods that plan once, after a context layer (`BudgetedSteering`), methods that
are asked before each block that they govern (`OnlineSteering`), and prompts that were planned whole
(`PlannedPromptSteering`).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.plan import DepthPlan, on_device
from buddy.depth.policy import DepthPolicy, NewTokens, Observation, OnlinePolicy
from buddy.depth.select import select_blocks
from buddy.depth.share import share_ranking
from buddy.engine.executors.protocol import Run
from buddy.engine.planned_prompt import PlannedPrompt
from buddy.engine.probe import ROUTER, piece
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.sequence import RouteRow, SequenceState, gather_routes
from buddy.errors import PolicyError

BatchRoute = Literal["independent", "shared"]
"""Each sequence of a pass ranks the blocks by its own scores, or all by one ranking: then a step
reads the blocks of the largest budget, not the union of all plans."""


def check_batch_route(batch_route: str) -> BatchRoute:
    """Refuse what is no way to route a batch.

    Raises:
        PolicyError: Neither "independent" nor "shared".
    """
    if batch_route not in get_args(BatchRoute):
        raise PolicyError(f'batch_route must be "independent" or "shared", got {batch_route!r}')
    return cast(BatchRoute, batch_route)


class Steering(ABC):
    """Says who runs each block; asked between the segments of a pass.

    Attributes:
        routes: After the plan, what the policy remembers of each sequence; nothing where the plan
            was not made by its scores.
    """

    routes: Sequence[RouteRow] = ()

    def segments(self, num_blocks: int) -> Sequence[range]:
        """Stretches of blocks that are run without asking, in their order: at first, all blocks."""
        return (range(num_blocks),)

    @abstractmethod
    def plan(self, blocks: range, run: Run) -> DepthPlan | None:
        """Who runs the blocks of a segment; None = every lane. Other blocks do not matter."""

    def ran(self, blocks: range, run: Run) -> None:  # noqa: B027  # most have nothing left to do
        """Told that a segment has run."""


def steer(
    run: Run, steering: Steering, num_blocks: int, num_logits: int | None = None
) -> tuple[DepthPlan, Float[Tensor, "lanes num_logits"] | None]:
    """Run a pass to its end.

    Args:
        run: The pass.
        steering: Says who runs what.
        num_blocks: Of the model.
        num_logits: How many token ids need logits, from the first on; None = all.

    Returns:
        The plan that ran, and logits where the run made them.
    """
    segments = [blocks for blocks in steering.segments(num_blocks) if len(blocks)]
    parts: list[DepthPlan | None] = []
    logits = None
    for blocks in segments:
        with piece(ROUTER):
            parts.append(steering.plan(blocks, run))
        if blocks.stop == num_blocks:
            logits = run.finish(blocks, parts[-1], num_logits)
        else:
            run.blocks(blocks, parts[-1])
        steering.ran(blocks, run)
    return _ran(segments, parts, run.lanes, num_blocks), logits


def _ran(
    segments: Sequence[range], parts: Sequence[DepthPlan | None], lanes: Lanes, num_blocks: int
) -> DepthPlan:
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    host = np.ones((lanes.num, num_blocks), np.bool_)
    for blocks, part in zip(segments, parts, strict=True):
        if part is not None:
            host[:, blocks.start : blocks.stop] = part.host[:, blocks.start : blocks.stop]
    return DepthPlan.of_lanes(host, lanes.device)


class OnlineSteering(Steering):
    """Asks an online policy before each block that it governs.

    Args:
        policy: Who is asked.
        sequences: What is known of the sequences of the pass, in the order of its lanes; None for
            a new one.
        router_sees: By lane; None = all are seen.
    """

    def __init__(
        self,
        policy: OnlinePolicy,
        sequences: Sequence[SequenceState | None],
        router_sees: Bool[Tensor, " lanes"] | None = None,
    ) -> None:
        self._policy, self._sequences, self._router_sees = policy, sequences, router_sees
        self._governed = {block % policy.num_blocks for block in policy.governed}
        self._state: Any = None
        self._before: Tensor | None = None

    def segments(self, num_blocks: int) -> Sequence[range]:
        """Each governed block by itself, and each stretch of the others between them."""
        stretches: list[range] = []
        for is_governed, group in groupby(range(num_blocks), self._governed.__contains__):
            blocks = list(group)
            if is_governed:
                stretches += [range(block, block + 1) for block in blocks]
            else:
                stretches.append(range(blocks[0], blocks[-1] + 1))
        return stretches

    def plan(self, blocks: range, run: Run) -> DepthPlan | None:
        """What the policy says of the residual as it is now."""
        policy, lanes = self._policy, run.lanes
        if blocks.start == 0:
            self._state = policy.begin(self._new(lanes))
        if blocks.start not in self._governed:
            return None
        if policy.adjusts_output:
            self._before = run.hidden
        keep = policy.keep(self._state, blocks.start, run.hidden)
        host = np.ones((lanes.num, policy.num_blocks), np.bool_)
        host[:, blocks.start] = keep.cpu().numpy()
        return DepthPlan.of_lanes(host, lanes.device)

    def ran(self, blocks: range, run: Run) -> None:
        """Let the policy change what a governed block has left."""
        before, self._before = self._before, None
        if before is not None:
            run.set_residual(self._policy.adjust_output(self._state, blocks.start, before, run))

    def _new(self, lanes: Lanes) -> NewTokens:
        sees = self._router_sees
        if sees is None:
            sees = torch.ones(lanes.num, dtype=torch.bool, device=lanes.device)
        return NewTokens(
            sequence=on_device(lanes.sequence, lanes.device),
            position=on_device(lanes.slot.astype(np.int64), lanes.device),
            router_sees=sees,
            last_runs=[
                known.block_mask if known and known.steps else None for known in self._sequences
            ],
        )


class BudgetedSteering(Steering):
    """Plans once: the context layer runs, the policy observes, and budgets are spent.

    Args:
        policy: Scores the blocks.
        sequences: What is known of the sequences of the pass, in the order of its lanes; None for
            a new one.
        budgets: Of each sequence: one for all its new tokens, or one for each.
        batch_route: Whose scores rank the blocks.
        routed_alone: Places of sequences that rank by their own scores even so, and have no say in
            the ranking of the others.
        sees_all: Whether the policy may see every new token.
    """

    def __init__(
        self,
        policy: DepthPolicy,
        sequences: Sequence[SequenceState | None],
        budgets: Sequence[tuple[int, ...]],
        batch_route: BatchRoute = "independent",
        routed_alone: Collection[int] = (),
        *,
        sees_all: bool = False,
    ) -> None:
        self._sees_all = sees_all
        self._policy, self._sequences, self._budgets = policy, sequences, budgets
        is_shared = batch_route == "shared"
        together = (
            [at for at in range(len(sequences)) if at not in routed_alone] if is_shared else []
        )
        self._together = together if len(together) > 1 else []

    def segments(self, num_blocks: int) -> Sequence[range]:
        """Up to the context layer, and the rest."""
        return range(self._policy.context_layer), range(self._policy.context_layer, num_blocks)

    def plan(self, blocks: range, run: Run) -> DepthPlan | None:
        """A new plan for the sequences that are due, the old one for the others."""
        if blocks.start < self._policy.context_layer:
            return None
        return self.choose(run.lanes, run.observe(self._policy.context_layer))

    def choose(self, lanes: Lanes, seen: Observation) -> DepthPlan:
        """The plan of lanes of which the policy may see this much."""
        self.routes = self._observe(seen)
        old = [self._old_plan(place) for place in range(len(self._sequences))]
        going_on = [block_mask for block_mask in old if block_mask is not None]
        if len(going_on) == len(old):
            return DepthPlan.of_lanes(np.stack(going_on), lanes.device).repeat(lanes.counts)
        new = self._new_plan(lanes, seen)
        if not going_on:
            return new
        host = new.host.copy()
        for place, block_mask in enumerate(old):
            if block_mask is not None:
                host[lanes.first[place] : lanes.last[place] + 1] = block_mask
        return DepthPlan.of_lanes(host, lanes.device)

    def _observe(self, seen: Observation) -> list[RouteRow]:
        """Show the policy what is new; new sequences begin a state, others go on with theirs."""
        routes = [None if known is None else known.route for known in self._sequences]
        after: list[RouteRow | None] = [None] * len(routes)
        for is_new in (True, False):
            places = [place for place, route in enumerate(routes) if (route is None) == is_new]
            if not places:
                continue
            old = [route for place in places if (route := routes[place]) is not None]
            part = seen if len(places) == len(routes) else seen.select_rows(places)
            state = self._policy.observe(gather_routes(old) if old else None, part)
            for row, place in enumerate(places):
                after[place] = RouteRow(state, row, len(places))
        return cast(list[RouteRow], after)

    def _old_plan(self, place: int) -> NDArray[np.bool_] | None:
        """The plan that a sequence goes on with; None where it is to have a new one."""
        known = self._sequences[place]
        if known is None or known.reroute == "step":
            return None
        is_due = known.reroute != "prefill" and known.steps % known.reroute == 0
        if is_due or set(self._budgets[place]) != {known.blocks}:
            return None
        return known.block_mask

    def _new_plan(self, lanes: Lanes, seen: Observation) -> DepthPlan:
        """Spend each lane's budget on its sequence's scores; a full budget needs no scores.

        Scores come to the host, which carries the plan out; a GPU is waited for once, if at all.
        """
        policy, budgets = self._policy, self._budgets
        depths = [set(each) for each in budgets]
        if all(each == {policy.num_blocks} for each in depths):
            return DepthPlan.full(lanes.num, policy.num_blocks, lanes.device)
        state = gather_routes(self.routes)
        blocks = torch.tensor([max(each) for each in depths])
        scores = policy.scores(state, blocks.to(lanes.device, non_blocking=True)).cpu()
        together = self._together
        if together and len(together) == len(blocks):
            scores = share_ranking(scores, policy.pinned, self._asked(seen))
        elif together:
            asked = self._asked(seen)[together]
            scores = scores.float().clone()
            scores[together] = share_ranking(scores[together], policy.pinned, asked)
        if all(len(each) == 1 for each in depths):
            plan = select_blocks(scores, blocks, pinned=policy.pinned)
            return DepthPlan.of_lanes(plan.host, lanes.device).repeat(lanes.counts)
        # Tokens of one sequence have budgets of their own: each pair of the two is planned once.
        by_lane = [
            each * count if len(each) == 1 else each
            for each, count in zip(budgets, lanes.counts, strict=True)
        ]
        pairs, place = np.unique(
            np.stack([lanes.sequence, np.concatenate(by_lane)], 1), axis=0, return_inverse=True
        )
        rows, blocks = torch.from_numpy(pairs.T)
        shared, there = scores[rows], on_device(pairs.T, lanes.device)
        scores = policy.scores(state.select_rows(there[0]), there[1]).cpu()
        scores = scores.to(shared.dtype, copy=True)
        is_shared = torch.isin(rows, torch.tensor(together, dtype=rows.dtype))
        scores[is_shared] = shared[is_shared]
        plan = select_blocks(scores, blocks, pinned=policy.pinned).select(place.ravel())
        return DepthPlan.of_lanes(plan.host, lanes.device)

    def _asked(self, seen: Observation) -> Bool[Tensor, " sequences"]:
        """Sequences of which the policy sees something new; on the host."""
        if self._sees_all:
            return torch.ones(len(seen.router_sees), dtype=torch.bool)
        return seen.router_sees.any(1).cpu()


class PlannedPromptSteering(Steering):
    """Prompts whose plan is known go by it; the policy is asked for the other sequences alone.

    Args:
        others: Steers the sequences without such a plan, in their order; its policy is asked before
            the first block.
        prompts: Of each sequence of the pass, in the order of its lanes; None = it has no plan.
    """

    def __init__(self, others: BudgetedSteering, prompts: Sequence[PlannedPrompt | None]) -> None:
        self._others, self._prompts = others, prompts

    def plan(self, blocks: range, run: Run) -> DepthPlan:
        """The known plans, and beside them what the policy says of the others."""
        lanes = run.lanes
        places = [place for place, prompt in enumerate(self._prompts) if prompt is None]
        host = np.empty((lanes.num, blocks.stop), np.bool_)
        if places:
            counts = [lanes.counts[place] for place in places]
            part = Lanes(
                tuple(lanes.rows[place] for place in places),
                tuple(lanes.starts[place] for place in places),
                tuple(counts),
                lanes.device,
            )
            seen = run.observe(0).select_rows(places).first(max(counts))
            host[np.isin(lanes.sequence, places)] = self._others.choose(part, seen).host
        routed = iter(self._others.routes)
        self.routes = [prompt.route if prompt else next(routed) for prompt in self._prompts]
        for place, prompt in enumerate(self._prompts):
            if prompt is not None:
                host[lanes.first[place] : lanes.last[place] + 1] = prompt.block_mask
        return DepthPlan.of_lanes(host, lanes.device)
