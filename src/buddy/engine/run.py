"""One forward pass under a plan: prefill, or a decode step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone, Rotary
from buddy.depth.plan import ALL_ROWS, BlockRows, DepthPlan
from buddy.depth.policy import DepthPolicy, Observation
from buddy.depth.select import check_spendable, select_blocks
from buddy.engine.executors.protocol import Decoder
from buddy.engine.state.cache import BlockKVCache, PassingKV, RowSet
from buddy.engine.state.session import Session
from buddy.engine.state.timeline import Timeline
from buddy.errors import PolicyError

Reroute = Literal["step", "prefill"] | int
"""New plan at every decode step, never after prefill (the paper's *Reuse*), or every n steps."""


BatchRoute = Literal["independent", "shared"]
"""Each row of a batch ranks the blocks by its own scores, or all by one ranking: then the blocks
that are read are those of the largest budget, not of the union of all plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one forward pass is given.

    Attributes:
        token_ids: New tokens, pads included.
        valid: False for pads.
        counted: Tokens that the route may see; a subset of `valid`.
        budgets: Blocks that each row runs.
        reroute: When to choose again.
        batch_route: Whose scores rank the blocks.
    """

    token_ids: Int[Tensor, "batch tokens"]
    valid: Bool[Tensor, "batch tokens"]
    counted: Bool[Tensor, "batch tokens"]
    budgets: tuple[int, ...]
    reroute: Reroute = "step"
    batch_route: BatchRoute = "independent"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward pass returns.

    Attributes:
        hidden: The residual after the last block.
        plan: What was to run.
        executed: Blocks that ran, counted where they ran.
        logits: Of all columns, where the pass made them.
    """

    hidden: Float[Tensor, "batch tokens hidden"]
    plan: DepthPlan
    executed: Int[Tensor, " batch"]
    logits: Float[Tensor, "batch tokens vocab"] | None = None


def check_reroute(reroute: Reroute) -> Reroute:
    """Refuse what is no re-routing rule.

    Raises:
        PolicyError: Neither "step" nor "prefill" nor a count of steps.
    """
    if reroute in ("step", "prefill") or (
        isinstance(reroute, int) and not isinstance(reroute, bool) and reroute >= 1
    ):
        return reroute
    raise PolicyError(
        f'reroute must be "step", "prefill" or a number of steps of at least 1, got {reroute!r}'
    )


def check_batch_route(batch_route: BatchRoute) -> BatchRoute:
    """Refuse what is no way to route a batch.

    Raises:
        PolicyError: Neither "independent" nor "shared".
    """
    if batch_route not in get_args(BatchRoute):
        raise PolicyError(f'batch_route must be "independent" or "shared", got {batch_route!r}')
    return batch_route


def run_step(
    backbone: Backbone,
    policy: DepthPolicy,
    session: Session,
    step: Step,
    decoder: Decoder | None = None,
) -> StepOutput:
    """Extend the session by one step: prefill or decode.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        session: What came before.
        step: What is new.
        decoder: Runs the steps that it takes; the general path is its reference.
    """
    # Before anything changes: a session outlives a request that is refused.
    check_spendable(step.budgets, policy.num_blocks, policy.pinned)
    length, before = session.timeline.length, session.state
    session.timeline.extend(step.valid)
    try:
        if decoder is not None and decoder.takes(session, step):
            return _run_decoder(decoder, policy, session, step)
        return _run_general(backbone, policy, session, step)
    except BaseException:
        session.cut(length)
        session.state = before
        raise


def _run_general(
    backbone: Backbone, policy: DepthPolicy, session: Session, step: Step
) -> StepOutput:
    run = BlockRun(backbone, session.timeline, session.kv, step.token_ids)
    run.blocks(range(policy.context_layer), None)
    plan = _begin_plan(policy, session, step)
    run.blocks(range(policy.context_layer, backbone.num_blocks), plan)
    return StepOutput(run.hidden, plan, run.executed())


def _run_decoder(decoder: Decoder, policy: DepthPolicy, session: Session, step: Step) -> StepOutput:
    run = decoder.begin(session, step.token_ids)
    run.blocks(range(policy.context_layer), None)
    plan = _begin_plan(policy, session, step)
    logits = run.finish(range(policy.context_layer, policy.num_blocks), plan)
    return StepOutput(run.hidden, plan, run.executed(), logits)


def _begin_plan(policy: DepthPolicy, session: Session, step: Step) -> DepthPlan:
    plan = route_step(policy, session, step)
    session.plan, session.budgets = plan, step.budgets
    session.steps += 1
    return plan


def route_step(policy: DepthPolicy, session: Session, step: Step) -> DepthPlan:
    """Show the policy what is new; return the plan of this step."""
    session.route = policy.observe(session.route, _observe(policy, session.kv, step))
    return _next_plan(policy, session, step)


def run_once(backbone: Backbone, policy: DepthPolicy, step: Step) -> StepOutput:
    """One pass that keeps nothing, so that gradients flow: training and scoring."""
    timeline = Timeline(len(step.valid), step.valid.shape[1], step.valid.device)
    timeline.extend(step.valid)
    kv = PassingKV()
    run = BlockRun(backbone, timeline, kv, step.token_ids)
    run.blocks(range(policy.context_layer), None)
    plan = make_plan(policy, policy.observe(None, _observe(policy, kv, step)), step)
    run.blocks(range(policy.context_layer, backbone.num_blocks), plan)
    return StepOutput(run.hidden, plan, run.executed())


def make_plan(policy: DepthPolicy, route: object, step: Step) -> DepthPlan:
    """Spend each row's budget on the policy's scores; a full budget needs no scores."""
    batch, device = len(step.budgets), step.valid.device
    if all(blocks == policy.num_blocks for blocks in step.budgets):
        return DepthPlan.full(batch, policy.num_blocks, device)
    blocks = torch.tensor(step.budgets, device=device)
    scores = policy.scores(route, blocks)
    if step.batch_route == "shared" and batch > 1:
        scores = share_ranking(scores, policy.pinned, step.counted.any(1))
    return select_blocks(scores, blocks, pinned=policy.pinned)


def share_ranking(
    scores: Float[Tensor, "batch blocks"],
    pinned: Sequence[int],
    asked: Bool[Tensor, " batch"],
) -> Float[Tensor, "batch blocks"]:
    """One ranking for all rows: the mean of their scores, each row's brought to the same scale.

    Pinned blocks, whose scores mean nothing, are left out of the scale; rows that are not asked
    (an ended row is fed pads), of the mean.
    """
    free = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
    free[[block % scores.shape[1] for block in pinned]] = False
    ranked = scores.float()
    chosen = ranked[:, free]
    mean, deviation = chosen.mean(1, keepdim=True), chosen.std(1, correction=0, keepdim=True)
    scaled = (ranked - mean) / torch.where(deviation > 0, deviation, 1.0)
    voting = scaled[asked] if bool(asked.any()) else scaled
    return voting.mean(0).expand_as(scores).contiguous()


def _next_plan(policy: DepthPolicy, session: Session, step: Step) -> DepthPlan:
    """The plan of this step: a new one where it is due, and for rows whose budget has changed."""
    old, every = session.plan, step.reroute
    due = every == "step" or (every != "prefill" and session.steps % every == 0)
    if old is not None and not due and step.budgets == session.budgets:
        return old
    new = make_plan(policy, session.route, step)
    if old is None or due:
        return new
    changed = [a != b for a, b in zip(step.budgets, session.budgets, strict=True)]
    return DepthPlan(
        torch.where(torch.tensor(changed, device=new.mask.device)[:, None], new.mask, old.mask)
    )


def _observe(policy: DepthPolicy, kv: "BlockKVCache | PassingKV", step: Step) -> Observation:
    if policy.context_layer == 0:
        return Observation(step.token_ids, step.counted)
    keys, values = kv.new_tokens(policy.context_layer - 1)
    return Observation(step.token_ids, step.counted, keys, values)


class BlockRun:
    """The residual of one pass, on its way through the blocks.

    At each block the rows that run it are gathered, run and scattered back; rows that skip it
    are not computed. Where all rows run there is no gather. Updates are out of place: the cache
    may still hold the residual that passed a block by.
    """

    def __init__(
        self,
        backbone: Backbone,
        timeline: Timeline,
        kv: "BlockKVCache | PassingKV",
        token_ids: Int[Tensor, "batch tokens"],
    ) -> None:
        self.hidden = backbone.embed(token_ids)
        self._backbone = backbone
        self._timeline = timeline
        self._kv = kv
        self._positions = timeline.new_positions
        self._rotary = backbone.rotary(self.hidden, self._positions)
        decodes = token_ids.shape[1] == 1
        self._open = backbone.open_mask(len(token_ids), timeline.length) if decodes else None
        self._by_all = 0
        self._by_some = torch.zeros(len(token_ids), dtype=torch.long, device=token_ids.device)

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every row runs them."""
        for block in blocks:
            rows = BlockRows(ALL_ROWS, None) if plan is None else plan.blocks[block]
            if rows.skip is not None:
                self._kv.skip(block, rows.skip, self.hidden)
            if rows.run is not None:
                self._kv.fill(block, rows.run)
                self._run(block, rows.run)

    def _run(self, block: int, rows: RowSet) -> None:
        mask, kv = self._mask(block, rows), self._kv.view(block, rows)
        if isinstance(rows, slice):
            self.hidden = self._backbone.run_block(
                block, self.hidden, mask, self._positions, self._rotary, kv
            )
            self._by_all += 1
            return
        hidden, positions, rotary = self.gather(rows)
        out = self._backbone.run_block(block, hidden, mask, positions, rotary, kv)
        self.scatter(rows, out)

    def gather(self, rows: Int[Tensor, " chosen"]) -> tuple[Tensor, Tensor, Rotary]:
        """What a block is given of these rows: residual, positions, rotary."""
        cos, sin = self._rotary
        return self.hidden[rows], self._positions[rows], (cos[rows], sin[rows])

    def scatter(
        self, rows: Int[Tensor, " chosen"], out: Float[Tensor, "chosen tokens hidden"]
    ) -> None:
        """Put what a block made of these rows in their place."""
        self.hidden = self.hidden.index_copy(0, rows, out)
        self._by_some[rows] += 1

    def _mask(self, block: int, rows: RowSet) -> Bool[Tensor, "batch 1 tokens slots"] | None:
        window = self._backbone.windows[block]
        mask = self._timeline.mask(window)
        mask = self._open if mask is None else mask
        visible = self._kv.visible(block, rows)
        if visible is None:
            return None if mask is None else mask[rows]
        mask = self._timeline.full_mask(window) if mask is None else mask
        return mask[rows] & visible[:, None, None]

    def executed(self) -> Int[Tensor, " batch"]:
        """Blocks that each row ran, counted as they ran."""
        return self._by_some + self._by_all
