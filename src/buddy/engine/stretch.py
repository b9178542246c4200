"""Neighbouring blocks for new tokens of one sequence: a pass left at an exit, and gone on with."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.protocol import Executor
from buddy.engine.feed import Feed
from buddy.engine.run import begin_run
from buddy.engine.state.sequence import SequenceState
from buddy.engine.state.session import Session
from buddy.engine.step import StepOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Blocks to be run for every new token, from the embedding or from where it was left.

    Attributes:
        sequence: `length` is the slot of the first of the tokens. It may be longer than what is
            committed, by tokens whose stretch of the same blocks has run before.
        token_ids: New tokens.
        blocks: To be run, without a gap.
        hidden: The residual that enters the first of them; None = the embedding.
        num_logits: How many token ids need logits of what the last of them leaves, from the first
            on; None = all.
    """

    sequence: SequenceState
    token_ids: Int[Tensor, " lanes"]
    blocks: range
    hidden: Float[Tensor, "lanes hidden"] | None = None
    num_logits: int | None = None


def run_stretch(
    backbone: Backbone, session: Session, stretch: Stretch, executor: Executor | None = None
) -> StepOutput:
    """Run a stretch; its output is that of a pass, and stops where the stretch does.

    Keys and values of its blocks are written to slots from `sequence.length` on, which are scratch
    until the caller commits; other blocks' slots stay as they are.

    Args:
        backbone: Runs the blocks.
        session: Holds the sequence.
        stretch: What is to run.
        executor: Runs the passes that it takes; the general path is its reference.
    """
    feed = Feed(token_ids=stretch.token_ids, counts=(len(stretch.token_ids),))
    lanes = session.begin((stretch.sequence,), feed.counts)
    run, engine = begin_run(backbone, session, lanes, feed, executor)
    if stretch.hidden is not None:
        run.set_residual(stretch.hidden.to(run.hidden.dtype))
    logits = None
    if stretch.num_logits == 0:
        run.blocks(stretch.blocks, None)
    else:
        logits = run.finish(stretch.blocks, None, stretch.num_logits)
    ran = np.zeros((lanes.num, backbone.num_blocks), np.bool_)
    ran[:, stretch.blocks] = True
    plan = DepthPlan.of_lanes(ran, lanes.device)
    return StepOutput(lanes, run.hidden, plan, run.executed(), logits, engine)
