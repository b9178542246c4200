"""Control: who says how deep rows run, how much prompt a pass may feed, and who is let in.

The engine's thread asks before each pass and reports after it. What it decides and counts is its
own matter; `NoControl` lets every row run as deep as it may.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from buddy.budget.resolved import ResolvedBudget
from buddy.serving.request import GenerationRequest, Usage

Ending = Literal["stop", "length", "cancelled", "failed"]
"""How a request ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowView:
    """A request that has a row of the cache, before a pass."""

    number: int
    """What `submit` returned."""
    budget: ResolvedBudget
    wanted: int
    """Blocks of a token of its answer without load: what the Budget Predictor chose, or the
    most."""
    depth: int
    """Blocks that its next token will run if nothing is said."""
    steps: int
    """Tokens since that depth changed."""
    context: int
    """Tokens in its cache."""
    is_elastic: bool
    """Whether its depth may be changed: never under a contract, nor, where the request has a seed,
    for load (its text must not depend on who else is there); a deadline's always."""
    prompt_left: int
    """Tokens of its prompt that are still to be fed; 0 = it decodes.

    The whole prompt runs at the depth that the row had when its first token was fed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueView:
    """Requests that have no row yet."""

    size: int
    prompt_tokens: float
    """Tokens of all their prompts, each by its `prompt_weight`."""
    oldest_s: float
    """How long the first of them has waited; 0 where none waits."""
    running: int = 0
    """Requests that have a row."""
    prompt_tokens_running: float = 0
    """Tokens of their prompts that are still to be fed, each by its weight."""
    head_blocks: float = 0.0
    """Blocks that cost what the logits of a token do."""


def prompt_weight(request: GenerationRequest, depth: int, head_blocks: float) -> float:
    """Weigh a token of a request's prompt; 1 = one that is not scored.

    Args:
        request: Whose prompt it is; a scored one has logits of every token.
        depth: Blocks that the token runs.
        head_blocks: Blocks that cost what its logits do.
    """
    return 1.0 if request.prompt_logprobs is None else 1.0 + head_blocks / depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What control says of one pass."""

    depths: Mapping[int, int] = field(default_factory=dict)
    """Blocks of elastic rows by number, within the least and most of each; others stay as they
    are."""
    prompt_tokens: int
    """Tokens of prompts that may be fed, in all; 0 = none now. A prompt that cannot be cut is fed
    whole where this is at least 1. Where no row decodes, at least 1 is fed."""
    unloaded: Mapping[int, int] = field(default_factory=dict)
    """Depths without load by number, where that is not a row's `wanted`: a deadline's
    depth on a machine of its own."""
    admits: bool = True
    """Whether a request that waits may take a free row."""
    allows_draft_passes: bool = True
    """Whether passes of few blocks may draft before a pass, so that tokens come later and several
    at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The counts of a pass, of which its cost is made."""

    rows: int = 0
    """Tokens of answers that are fed: one of each row, and what is drafted."""
    union: int = 0
    """Blocks that any lane runs."""
    row_blocks: int = 0
    """Blocks that run, over all lanes of answers."""
    block_context: int = 0
    """Blocks that run over those lanes, times the tokens of context that each looks at."""
    prompt_lanes: int = 0
    """Tokens of prompts."""
    prompt_blocks: int = 0
    """Blocks that these run, over all of them."""
    scored_blocks: float = 0.0
    """Blocks of as many weights as the output projection reads for prompts that are scored."""

    @staticmethod
    def of_rows(
        depths: Sequence[int],
        contexts: Sequence[int],
        *,
        prompt_lanes: int = 0,
        prompt_depth: int = 0,
    ) -> "StepShape":
        """A step of rows with one ranking of the blocks, so that it reads those of the deepest.

        Args:
            depths: Of each row that decodes, in blocks.
            contexts: Of each, in tokens.
            prompt_lanes: Tokens of prompts that are fed along.
            prompt_depth: Blocks that each of these runs.
        """
        return StepShape(
            rows=len(depths),
            union=max(max(depths, default=0), prompt_depth if prompt_lanes else 0),
            row_blocks=sum(depths),
            block_context=sum(d * c for d, c in zip(depths, contexts, strict=True)),
            prompt_lanes=prompt_lanes,
            prompt_blocks=prompt_lanes * prompt_depth,
        )

    def with_prompt(self, tokens: int, depth: int) -> "StepShape":
        """The same rows with tokens of prompts fed along, in the place of those that it has."""
        return StepShape(
            rows=self.rows,
            union=max(self.union, depth if tokens else 0),
            row_blocks=self.row_blocks,
            block_context=self.block_context,
            prompt_lanes=tokens,
            prompt_blocks=tokens * depth,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport(StepShape):
    """A pass that has run."""

    seconds: float
    """The pass alone, with scores of prompts, without sampling and delivery."""
    gaps_s: tuple[float, ...] = ()
    """The time since its last token, of each row that got any and had one before."""
    drafted: int = 0
    """Tokens of answers that were drafted, and fed to be verified."""
    accepted: int = 0
    """Those of them that answers have."""
    draft_s: float = 0.0
    """What passes of few blocks took that drafted for it, before it."""
    draft_blocks: int = 0
    """Blocks that ran in these."""
    firsts_s: tuple[float, ...] = ()
    """The time since it was submitted, of each row that got its first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges:
    """What the engine holds at this moment."""

    running: int
    waiting: int
    kept_prefixes: int
    kept_tokens: int
    """Tokens of the prefix cache."""
    cache_bytes: int
    """Bytes of keys, values and residuals."""
    state: str


@runtime_checkable
class Control(Protocol):
    """Decides, and counts.

    `admit`, `metrics` and the properties are called from any thread, the others from the engine's;
    all return soon.
    """

    @property
    def least_ms_per_token(self) -> float:
        """The shortest time for a token that this machine reaches, alone, at the smallest budget.

        0 = it is not known.
        """
        ...

    @property
    def max_queue(self) -> int | None:
        """Requests that may wait; None = any number."""
        ...

    def admit(self, request: GenerationRequest, queue: QueueView) -> None:
        """Let a request into the queue.

        Raises:
            Overloaded: It will not be taken now.
            BudgetError: Its deadline is below what the machine reaches.
        """
        ...

    def decide(self, rows: Sequence[RowView], queue: QueueView) -> Orders:
        """Decide before each pass for all rows; there is at least one where none waits."""
        ...

    def report(self, step: StepReport) -> None:
        """Take note of a pass that has run."""
        ...

    def ended(self, how: Ending, usage: Usage | None, seconds: float) -> None:
        """A request is over, so long after it was submitted; no usage where it never got a row."""
        ...

    def metrics(self, now: Gauges) -> bytes:
        """Counters and gauges in Prometheus' text format."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NoControl:
    """Every row as deep as it wants, whatever the load; a queue of any length."""

    prompt_tokens: int = 256
    """That a pass may feed."""
    least_ms_per_token: float = 0.0
    max_queue: int | None = None

    def admit(self, request: GenerationRequest, queue: QueueView) -> None:
        """All are let in."""

    def decide(self, rows: Sequence[RowView], queue: QueueView) -> Orders:
        """Nothing is changed."""
        return Orders(prompt_tokens=self.prompt_tokens)

    def report(self, step: StepReport) -> None:
        """Nothing is counted."""

    def ended(self, how: Ending, usage: Usage | None, seconds: float) -> None:
        """Nothing is counted."""

    def metrics(self, now: Gauges) -> bytes:
        """What the engine holds."""
        return (
            f"buddy_requests_running {now.running}\nbuddy_requests_waiting {now.waiting}\n"
        ).encode()
