"""One pass for many plans of the same prompts: plans that have run the same blocks so far share.

The plans of a row form a prefix tree over the blocks. At each block only the tree's distinct nodes
are run, all rows together: as top-k plans of one ranking are nested, all depths of one prompt cost
about half of what they cost apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone, Rotary
from buddy.depth.plan import DepthPlan
from buddy.depth.policy import DepthPolicy, Observation
from buddy.depth.select import select_blocks
from buddy.training.batches import Batch
from buddy.training.packing import PackedRun, begin_pass

_TOKENS_AT_ONCE: Final = 4096
"""Tokens of one call of a block: what its MLP makes of more leaves the processor's caches."""


@dataclass(frozen=True, slots=True)
class SharedPass:
    """What came out of the last block.

    Attributes:
        hidden: Of every distinct (row, plan).
        owner: Row of the batch that each of them belongs to.
        leaf: Which of them each plan of each row ended in.
        num_block_runs: How often a row ran a block, over all of them.
    """

    hidden: Float[Tensor, "leaves tokens hidden"]
    owner: Int[Tensor, " leaves"]
    leaf: Int[Tensor, "batch plans"]
    num_block_runs: int


@torch.no_grad()
def run_shared(
    backbone: Backbone, policy: DepthPolicy, batch: Batch, blocks: Int[Tensor, "batch plans"]
) -> SharedPass:
    """Run each row under several budgets, routed by its prompt alone.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        batch: Prompts and answers, padded on the right.
        blocks: Budgets of each row; equal ones cost nothing twice.
    """
    return run_plans(
        backbone,
        policy.context_layer,
        batch,
        lambda seen: _plans(policy, seen, blocks).mask.view(*blocks.shape, -1),
    )


@torch.no_grad()
def run_plans(
    backbone: Backbone,
    context_layer: int,
    batch: Batch,
    plans: Callable[[Observation], Bool[Tensor, "batch plans blocks"]],
) -> SharedPass:
    """Run each row under several plans.

    Args:
        backbone: Runs the blocks.
        context_layer: Blocks that run before the plans are asked for.
        batch: Prompts and answers, padded on the right.
        plans: From what these blocks cached of the prompts to the plans of each row.
    """
    # Pads stand right: under causal attention no token sees them, so none need be masked.
    run = begin_pass(PackedRun, backbone, batch)
    run.blocks(range(context_layer), None)
    masks = plans(run.observe(context_layer))
    walk = _Walk(backbone, run, masks)
    for block in range(context_layer, backbone.num_blocks):
        walk.step(block)
    before = context_layer * len(batch.token_ids)
    return SharedPass(walk.hidden, walk.owner, walk.leaf, walk.num_block_runs + before)


def _plans(policy: DepthPolicy, seen: Observation, blocks: Int[Tensor, "batch plans"]) -> DepthPlan:
    """All plans of all rows, those of a row side by side."""
    rows = torch.arange(len(blocks), device=blocks.device).repeat_interleave(blocks.shape[1])
    state = policy.observe(None, seen).select_rows(rows)
    return select_blocks(
        policy.scores(state, blocks.flatten()), blocks.flatten(), pinned=policy.pinned
    )


class _Walk:
    """The tree's present nodes, from block to block."""

    def __init__(
        self, backbone: Backbone, run: PackedRun, masks: Bool[Tensor, "batch plans blocks"]
    ) -> None:
        self._frame = run.lanes.whole
        self.hidden = self._frame.spread(run.hidden)
        self.owner = torch.arange(len(masks), device=masks.device)
        self.leaf = self.owner[:, None].expand(masks.shape[:2])
        self.num_block_runs = 0
        self._backbone, self._masks = backbone, masks
        self._rotary = backbone.rotary(self.hidden, self._frame.positions)

    def step(self, block: int) -> None:
        """Part the nodes whose plans differ at this block, then run it where it is to run."""
        runs = self._masks[:, :, block]
        nodes, leaf = torch.unique(self.leaf * 2 + runs, return_inverse=True)
        self.leaf = leaf.view(runs.shape)
        parent, is_run = nodes // 2, nodes % 2 == 1
        if len(parent) != len(self.hidden):
            self.hidden, self.owner = self.hidden[parent], self.owner[parent]
        rows = is_run.nonzero()[:, 0]
        self.num_block_runs += len(rows)
        if len(rows) == 0:
            return
        for part in rows.split(max(1, _TOKENS_AT_ONCE // self.hidden.shape[1])):
            self.hidden = self.hidden.index_copy(0, part, self._run(block, part))

    def _run(
        self, block: int, nodes: Int[Tensor, " chosen"]
    ) -> Float[Tensor, "chosen tokens hidden"]:
        owner = self.owner[nodes]
        mask = self._frame.mask(self._backbone.windows[block])
        cos, sin = self._rotary
        rotary: Rotary = (cos[owner], sin[owner])
        return self._backbone.run_block(
            block,
            self.hidden[nodes],
            None if mask is None else mask[owner],
            self._frame.positions[owner],
            rotary,
            None,
        )
