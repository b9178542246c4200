"""What a client asks of the engine, and what comes back, token by token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from buddy.budget.resolved import Phase, ResolvedBudget
from buddy.budget.thinking import ThinkingLimit, ThinkingMarks
from buddy.errors import BuddyError
from buddy.generation.drafts import Drafts

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is chosen; fields as in OpenAI's bodies, and top_k, min_p as in vLLM's."""

    temperature: float = 1.0
    """0 = the best token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: int | None = None
    """The same text for the same request, whatever ran before; None = drawn."""


class GrammarError(BuddyError):
    """A schema that is none, or that cannot be followed.

    Args:
        message: What is wrong.
        param: The field of the request that asked for it.
    """

    def __init__(self, message: str, param: str = "response_format") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Thought:
    """Thinking aloud, which is of no grammar.

    Attributes:
        open_token: With which it begins.
        close_token: With which it ends.
        is_open: Whether the prompt ends within it.
    """

    open_token: int
    close_token: int
    is_open: bool

    @classmethod
    def of(cls, marks: ThinkingMarks, prompt: Sequence[int]) -> "Thought":
        """What may be thought after a prompt."""
        return cls(marks.open_token, marks.close_token, marks.is_open(prompt))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """What the text must be: any JSON object, one of a schema, or a text of a grammar."""

    schema: str | None = None
    """JSON; None = any object."""
    lark: str | None = None
    """A grammar in llguidance's dialect of Lark, in the place of a schema."""
    after: Thought | None = None
    """What may come before it; None = nothing."""
    param: str = "response_format"
    """The field of the request that asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One answer to one prompt; `n` answers are as many requests."""

    prompt: tuple[int, ...]
    """Token ids."""
    max_tokens: int
    """0 = none: the prompt is fed, and scored where that is asked."""
    budget: ResolvedBudget
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are no part of it."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer and are no part of it, beside those of the model."""
    min_tokens: int = 0
    """Tokens before which nothing ends the answer."""
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that are text all the same; others are not."""
    top_logprobs: int | None = None
    """How many alternatives come with each token's logprob; None = no logprobs."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens; with them nothing of it is taken from an earlier one."""
    grammar: Grammar | None = None
    thinking: ThinkingLimit | None = None
    """How long it may think; None = any number of tokens."""
    continues: bool = False
    """The text goes on from the prompt's, as a completion does: it may begin with a space."""
    drafts: Drafts = field(default_factory=Drafts)
    """What it is drafted from; the text is the same."""
    ignore_eos: bool = False
    """Go on to `max_tokens`; for load tests."""
    owner: str = ""
    """Whose it is: cached prompts are shared with requests of the same owner alone."""
    is_first: bool = True
    """Whether it is the first of the answers that a client asked for at once. What is promised for
    a first token is promised for this one: the others may wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of one token, after penalties and bias, before temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first."""
    offset: int = 0
    """Characters of the answer that are complete before it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptScores:
    """What the model, as deep as the prompt ran, says of each of its tokens from the second on.

    Logarithms are natural ones of the model's own probabilities: no penalty, bias, grammar or
    temperature counts.
    """

    logprobs: NDArray[np.float32]
    """[tokens - 1]."""
    ranks: NDArray[np.int32]
    """[tokens - 1]: 1 = the most likely token."""
    top_tokens: NDArray[np.int32]
    """[tokens - 1, alternatives], ids of the most likely tokens, best first."""
    top_logprobs: NDArray[np.float32]
    """[tokens - 1, alternatives]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New text. Some tokens give none yet: half a character, or what may begin a stop string."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    runs: tuple[NDArray[np.bool_], ...] = ()
    """[blocks] for each token: which blocks made its logits."""
    prompt: PromptScores | None = None
    """Comes once where it is asked for, before the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseUsage:
    """What the tokens of a phase took."""

    tokens: int = 0
    """That were fed; cached ones were not, nor is the last one of an answer."""
    blocks_executed: int = 0
    """Blocks that these ran, all together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What an answer took."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the prefix cache had."""
    completion_tokens: int
    blocks_executed: int
    """Blocks of all tokens that were fed, prompt included, cached ones not."""
    budget_blocks: int
    """The largest budget of a token of the answer."""
    blocks_per_token: float
    """Mean over the tokens of the answer; the first ran at the depth of the prompt."""
    distinct_plans: int
    source: str
    """fixed, mean, auto, deadline or default."""
    lowered_from: int | None
    """What it would have had without load; None where nothing was lowered."""
    phases: Mapping[Phase, PhaseUsage] | None = None
    """Usage by phase, where phases have budgets of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The last event of an answer."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The last event of an answer that cannot be given."""

    message: str
    param: str | None = None
    """The field of the request that is at fault; None = the engine is."""


Event = Delta | Finished | Failed
Deliver = Callable[[Event], None]
"""Called by the engine's thread, in order; it must not block and must not raise."""
