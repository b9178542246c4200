"""Neighbouring blocks for new tokens of one sequence: a pass left at an exit, and gone on with."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.executors.protocol import GENERAL, Executor, Run
from buddy.engine.probe import HEAD, piece
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.sequence import SequenceState
from buddy.engine.state.session import Session


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a stretch of blocks has left.

    Attributes:
        lanes: New tokens, and where they stand.
        hidden: The residual after the last of the blocks.
        executed: Blocks that ran, counted where they ran; on the host.
        engine: Who ran them.
        logits: Of that residual; None where they were not asked for.
    """

    lanes: Lanes
    hidden: Float[Tensor, "lanes hidden"]
    executed: Int[Tensor, " lanes"]
    engine: str
    logits: Float[Tensor, "lanes words"] | None


def run_stretch(
    backbone: Backbone,
    session: Session,
    one: SequenceState,
    token_ids: Int[Tensor, " lanes"],
    blocks: range,
    *,
    hidden: Float[Tensor, "lanes hidden"] | None = None,
    with_logits: bool,
    words: int | None = None,
    executor: Executor | None = None,
) -> Stretch:
    """Run a stretch of blocks for every new token, from the embedding or from where it was left.

    Keys and values of these blocks are written to slots from `one.length` on, which are scratch
    until the caller commits; other blocks' slots stay as they are.

    Args:
        backbone: Runs the blocks.
        session: Holds the sequence.
        one: The sequence, `length` being the slot of the first of these tokens. It may be longer
            than what is committed, by tokens whose stretch of the same blocks has run before.
        token_ids: New tokens.
        blocks: To be run, without a gap.
        hidden: The residual that enters the first of them; None = the embedding.
        with_logits: Whether to make logits of what the last of them leaves.
        words: How many token ids need logits, from the first on; None = all.
        executor: Runs the passes that it takes; the general path is its reference.
    """
    lanes = session.begin((one,), (len(token_ids),))
    takes = executor is not None and not torch.is_grad_enabled() and executor.takes(lanes)
    fast = executor if takes else None
    run: Run
    if fast is None:
        run = BlockRun(backbone, lanes, session.kv, token_ids)
    else:
        run = fast.begin(session, lanes, token_ids, None)
    if hidden is not None:
        run.settle(hidden.to(run.hidden.dtype))
    logits = None
    if with_logits:
        logits = run.finish(blocks, None, words)
    else:
        run.blocks(blocks, None)
    if with_logits and logits is None:
        with piece(HEAD):
            logits = backbone.logits(run.hidden)[:, :words]
    engine = GENERAL if fast is None else fast.name
    return Stretch(lanes, run.hidden, run.executed(), engine, logits)
