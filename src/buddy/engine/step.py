"""What a pass is given and what it returns: new tokens, whose they are, and what ran."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.source import (
    ConstantBudget,
    Progress,
    blocks_of_lanes,
    note_of,
    reads_tokens,
)
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.protocol import GENERAL, Executor
from buddy.engine.feed import Feed
from buddy.engine.planned_prompt import PlannedPrompt
from buddy.engine.probe import HEAD, piece
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.sequence import SequenceState
from buddy.engine.steer import BatchRoute, Steering
from buddy.errors import PromptError


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """New tokens of some sequences of a session, and how they are routed.

    Attributes:
        sequence_ids: As the session numbers them, in the order of the feed.
        feed: What is new.
        sequences: The same sequences as they are to go on, where a source or a rule of theirs is
            another now; None = as the session has them.
        batch_route: Whose scores rank the blocks.
        routed_alone: Sequences that are routed independently, whatever `batch_route` says.
        planned_prompts: Of sequences that are fed a part of their prompt, the plan of the whole of
            it. Their budgets are those of these plans.
        steering: Says who runs what, in the place of the policy.
        columns: Columns of a padded batch that the feed was made of.
        num_logits: How many token ids need logits, from the first on, where the pass makes them;
            None = all.
    """

    sequence_ids: Sequence[int]
    feed: Feed
    sequences: Sequence[SequenceState] | None = None
    batch_route: BatchRoute = "independent"
    routed_alone: Collection[int] = ()
    planned_prompts: Mapping[int, PlannedPrompt] | None = None
    steering: Steering | None = None
    columns: int = 0
    num_logits: int | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one pass returns, by lane.

    Attributes:
        lanes: New tokens, and where they stand.
        hidden: The residual after the last block.
        plan: What ran.
        executed: Blocks that ran, counted where they ran; on the host.
        logits: Where the pass made them.
        engine: Who ran it.
    """

    lanes: Lanes
    hidden: Float[Tensor, "lanes hidden"]
    plan: DepthPlan
    executed: Int[Tensor, " lanes"]
    logits: Float[Tensor, "lanes num_logits"] | None = None
    engine: str = GENERAL

    @property
    def last_plan(self) -> DepthPlan:
        """What the last new token of each sequence ran, in the order of the sequences."""
        return self.plan.select(self.lanes.last)


def logits_of(
    backbone: Backbone,
    out: StepOutput,
    executor: Executor | None = None,
    *,
    hidden: Float[Tensor, "*shape hidden"] | None = None,
    num_logits: int | None = None,
) -> Float[Tensor, "*shape num_logits"]:
    """Logits of every lane, or of some residuals of a pass; made now where the pass made none.

    Args:
        backbone: Has the output projection.
        out: The pass.
        executor: Who may have run it.
        hidden: Of these alone; None = of every lane.
        num_logits: As the pass was told; None = of every token id.
    """
    if hidden is None:
        if out.logits is not None:
            return out.logits[..., :num_logits]
        hidden = out.hidden
    with piece(HEAD):
        logits = None
        if executor is not None and out.engine == executor.name:
            logits = executor.logits(hidden)
        if logits is None:  # compiled code leaves float32
            hidden = hidden if out.engine == GENERAL else hidden.to(backbone.dtype)
            logits = backbone.logits(hidden)
        return logits[..., :num_logits]


def check_context(sequences: Sequence[SequenceState], feed: Feed, backbone: Backbone) -> None:
    """Refuse new tokens that the model's context does not hold.

    Raises:
        PromptError: A sequence would be longer than the context, or the feed is of others.
    """
    if len(sequences) != len(feed.counts):
        raise PromptError(f"{len(feed.counts)} sequences are fed, and {len(sequences)} are named")
    longest = max(
        sequence.length + count for sequence, count in zip(sequences, feed.counts, strict=True)
    )
    context = backbone.context
    if longest > context:
        raise PromptError(
            f"a sequence would have {longest} tokens, but the model's context holds {context}"
        )


def ask_budgets(
    sequences: Sequence[SequenceState], feed: Feed, num_blocks: int
) -> list[tuple[int, ...]]:
    """What each sequence's source allows its new tokens: one budget for all, or one for each.

    Raises:
        BudgetError: A source names no budget that the model can spend.
    """
    if all(type(sequence.source) is ConstantBudget for sequence in sequences):
        return [(cast(ConstantBudget, sequence.source).each,) for sequence in sequences]
    return [
        blocks_of_lanes(sequence.source, progress)
        for sequence, progress in zip(
            sequences, _progress(sequences, feed, num_blocks), strict=True
        )
    ]


def ask_notes(sequences: Sequence[SequenceState], feed: Feed, num_blocks: int) -> list[Any]:
    """What each sequence's source has noted, once its new tokens have run."""
    if not any(hasattr(sequence.source, "note") for sequence in sequences):
        return [sequence.note for sequence in sequences]
    return [
        note_of(sequence.source, progress)
        for sequence, progress in zip(
            sequences, _progress(sequences, feed, num_blocks), strict=True
        )
    ]


def _progress(
    sequences: Sequence[SequenceState], feed: Feed, num_blocks: int
) -> Iterator[Progress]:
    """What the source of each sequence is told before a pass."""
    token_ids: list[int] = []
    if any(reads_tokens(sequence.source) for sequence in sequences):
        token_ids = feed.token_ids.tolist()
    first = 0
    for sequence, count, is_prompt in zip(
        sequences, feed.counts, are_prompts(sequences, feed), strict=True
    ):
        reads = reads_tokens(sequence.source)
        yield Progress(
            is_prompt=is_prompt,
            new_tokens=count,
            tokens=sequence.length,
            executed=sequence.executed,
            num_blocks=num_blocks,
            answer_tokens=sequence.length - sequence.prompt_length,
            answer_executed=sequence.executed - sequence.prompt_executed,
            token_ids=tuple(token_ids[first : first + count]) if reads else (),
            note=sequence.note,
        )
        first += count


def are_prompts(sequences: Sequence[SequenceState], feed: Feed) -> tuple[bool, ...]:
    """Whether the new tokens of each sequence are of its prompt."""
    return feed.prompts or tuple(sequence.steps == 0 for sequence in sequences)
