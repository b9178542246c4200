"""The training pass: hard plans forward, straight-through gates backward, routes from the prompt.

A gate multiplies nothing: it adds `(g - value of g) * (what the block did to the residual)`, which
is zero, and whose derivative by `g` is the straight-through gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.plan import DepthPlan
from buddy.depth.policy import DepthPolicy, Observation
from buddy.engine.run import BlockRun
from buddy.engine.state.cache import PassingKV
from buddy.engine.state.timeline import Timeline
from buddy.training.batches import Batch


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and what it leaves for the backward pass.

    Attributes:
        plan: What runs.
        gates: [batch, blocks], for the straight-through gradient; None without.
        log_prob: [batch], of sampled plans; None where nothing was sampled.
    """

    plan: DepthPlan
    gates: Float[Tensor, "batch blocks"] | None = None
    log_prob: Float[Tensor, " batch"] | None = None


Choose = Callable[[Float[Tensor, "batch blocks"]], Choice]
"""From scores to a choice; the budgets are known to it."""


@dataclass(frozen=True, slots=True)
class GatedPass:
    """What a training pass returns.

    Attributes:
        hidden: The residual after the last block.
        choice: The plan of the prompt.
    """

    hidden: Float[Tensor, "batch tokens hidden"]
    choice: Choice


@dataclass(frozen=True, slots=True)
class Second:
    """A second route, as re-routing within the answer would choose it.

    Attributes:
        choice: Its plan, equal to the first one's for rows that have no second route.
        tokens: True where the second plan holds.
    """

    choice: Choice
    tokens: Bool[Tensor, "batch tokens"]


class GatedRun(BlockRun):
    """A pass in which gates get gradients, and tokens of one row may follow two plans."""

    first: Choice | None = None
    second: Second | None = None
    dense = False

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; those of `first` and `second` say who keeps what."""
        for block in blocks:
            before = self.hidden
            super().blocks(range(block, block + 1), plan)
            if self.first is not None and plan is not None:
                self._settle(block, before, plan)

    def _settle(self, block: int, before: Tensor, plan: DepthPlan) -> None:
        after = self.hidden
        gate = self._gate(block)
        if self.second is not None:
            keep = torch.where(
                self.second.tokens,
                self.second.choice.plan.mask[:, block, None],
                self._first.plan.mask[:, block, None],
            )
            self.hidden = torch.where(keep[..., None], after, before)
        if gate is None:
            return
        done = (after - before).detach()
        skipped = plan.blocks[block].skip
        if self.dense and skipped is not None:
            done = self._done_by_skipped(block, before, done, plan)
        straight = (gate - gate.detach())[..., None].to(done.dtype)
        self.hidden = self.hidden + straight * done

    @property
    def _first(self) -> Choice:
        assert self.first is not None
        return self.first

    def _gate(self, block: int) -> Float[Tensor, "batch tokens"] | None:
        if self._first.gates is None:
            return None
        gate = self._first.gates[:, block, None].expand(-1, self.hidden.shape[1])
        if self.second is None or self.second.choice.gates is None:
            return gate
        return torch.where(self.second.tokens, self.second.choice.gates[:, block, None], gate)

    @torch.no_grad()
    def _done_by_skipped(
        self, block: int, before: Tensor, done: Tensor, plan: DepthPlan
    ) -> Float[Tensor, "batch tokens hidden"]:
        """What the block would have done to the rows that skip it, for their gates alone."""
        rows = (~plan.mask[:, block]).nonzero()[:, 0]
        here = BlockRun.gather(self, rows)
        mask = self._mask(block, rows)
        out = self._backbone.run_block(block, before[rows], mask, here[1], here[2], None)
        return done.index_copy(0, rows, out - before[rows])


def gated_pass(
    backbone: Backbone,
    policy: DepthPolicy,
    batch: Batch,
    budgets: Int[Tensor, " batch"],
    choose: Choose,
    *,
    dense: bool = False,
    second_from: Int[Tensor, " batch"] | None = None,
) -> GatedPass:
    """One pass over prompts and answers, routed by the prompts alone.

    Args:
        backbone: The model, adapters included.
        policy: Who scores the blocks.
        batch: Prompts and answers.
        budgets: Blocks of each row.
        choose: Makes plan and gates of the scores.
        dense: Compute skipped blocks too, for their gates' gradients.
        second_from: Columns from which each row follows a second plan, chosen from what stands
            before; a row whose column is the width has none. Blocks that the two plans do not
            share see the other tokens' keys and values as `project` and `lazy` leave them.
    """
    # Pads stand right: under causal attention no token sees them, so none need be masked.
    timeline = Timeline(len(batch.token_ids), batch.token_ids.shape[1], batch.token_ids.device)
    timeline.extend(torch.ones_like(batch.is_prompt))
    kv = PassingKV()
    run = GatedRun(backbone, timeline, kv, batch.token_ids)
    run.blocks(range(policy.context_layer), None)
    keys, values = kv.new_tokens(policy.context_layer - 1) if policy.context_layer else (None, None)

    def choice_from(counted: Bool[Tensor, "batch tokens"]) -> Choice:
        state = policy.observe(None, Observation(batch.token_ids, counted, keys, values))
        return choose(policy.scores(state, budgets))

    run.first, run.dense = choice_from(batch.is_prompt), dense
    plan = run.first.plan
    if second_from is not None:
        column = torch.arange(batch.token_ids.shape[1], device=second_from.device)
        later = column >= second_from[:, None]
        # Rows without a second route see the same tokens again, and so choose the same.
        any_later = later.any(1, keepdim=True)
        run.second = Second(choice_from(torch.where(any_later, ~later, batch.is_prompt)), later)
        plan = DepthPlan(plan.mask | run.second.choice.plan.mask)
    run.blocks(range(policy.context_layer, backbone.num_blocks), plan)
    return GatedPass(run.hidden, run.first)
