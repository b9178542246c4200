"""The JSON of answers: OpenAI's, and what of it is ours."""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from buddy.budget.resolved import Phase
from buddy.serving.client import EngineState
from buddy.serving.request import FinishReason

End = FinishReason | Literal["tool_calls"]
"""Why an answer has ended, as clients are told."""


@with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
class _Reply(TypedDict):
    """Model of a reply; what is made by its name is a dictionary, and costs no more than one."""


class Error(_Reply):
    """What is wrong with a request, or with the server."""

    message: str
    type: str
    param: str | None
    """The field that is meant."""
    code: str | None


class ErrorBody(_Reply):
    """The body of every answer that is none."""

    error: Error


class PhaseUsageBody(_Reply):
    """What the tokens of a phase took."""

    tokens: int
    """That were fed; cached ones were not, nor is the last one of an answer."""
    blocks_executed: int


class DepthUsage(_Reply):
    """What an answer took of the model's depth."""

    budget_blocks: int
    """The largest budget of a token of the answer."""
    blocks_executed: int
    """Blocks of all tokens that were fed, prompt included, cached ones not."""
    blocks_per_token: float
    """Mean over the tokens of the answer; the first ran at the depth of the prompt."""
    num_blocks: int
    distinct_plans: int
    """Distinct plans of the answer that has most."""
    source: str
    """fixed, mean, auto, deadline or default."""
    lowered_from: int | None
    """What it would have had without load; null where nothing was lowered."""
    phases: NotRequired[dict[Phase, PhaseUsageBody]]
    """Usage by phase, where phases have budgets of their own: prompt, think, answer."""


class PromptDetails(_Reply):
    """More about the tokens of the prompt."""

    cached_tokens: int


class UsageBody(_Reply):
    """OpenAI's usage, and ours."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    buddy: DepthUsage


class TopLogprob(_Reply):
    """A token that might have been."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8; a part of a character is called by them, such as `bytes:\\xe2\\x80`."""


class ChatLogprob(TopLogprob):
    """A token, and those that might have been."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Reply):
    """Log-probabilities of a chat's choice."""

    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(_Reply):
    """Log-probabilities of a completion's choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt, as its alternatives are."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionBody(_Reply):
    """The function of a call."""

    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCallBody(_Reply):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionBody


class ToolCallPart(ToolCallBody):
    """A call of a tool in a stream, where each comes whole."""

    index: int


class PromptLogprob(_Reply):
    """A token of a prompt, or one that might have been."""

    logprob: float
    rank: int
    """1 = the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Tokens by id for each of a prompt: itself, then the likeliest; null for the first."""


class AnswerMessage(_Reply):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    """Null where it calls tools and says nothing."""
    refusal: None
    reasoning_content: NotRequired[str]
    """What it thought aloud first."""
    tool_calls: NotRequired[list[ToolCallBody]]


class ChatChoice(_Reply):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: End


class CompletionChoice(_Reply):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: End
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Where it is asked for."""


class ChatDelta(_Reply):
    """New text of an answer: the first has the role, and the last may have nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPart]]


class ChatPart(_Reply):
    """What came of an answer; the last says why it ended."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: End | None


class CompletionPart(_Reply):
    """What came of an answer; the last says why it ended."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: End | None


class Head(_Reply):
    """What whole answers and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    """Answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Where it is asked for."""


class Completion(Head):
    """Answers to prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageBody


class ResponseUsage(_Reply):
    """Usage as the Responses API names it, and ours."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    buddy: DepthUsage


class ResponseBody(_Reply):
    """An answer of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    """Items of the types reasoning, message and function_call."""
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]


class DepthRuns(_Reply):
    """Which blocks made the tokens of a chunk."""

    runs: list[str]
    """A 1 for each block that ran and a 0 for each other, token by token."""


class ChunkExtras(_Reply):
    """What a chunk has for those who ask for it."""

    usage: NotRequired[UsageBody | None]
    buddy: NotRequired[DepthRuns]


ChunkObject = Literal["chat.completion.chunk", "text_completion"]


class Chunk(Head, ChunkExtras):
    """An event of a stream."""

    object: ChunkObject
    choices: list[ChatPart | CompletionPart]


class ModelFacts(_Reply):
    """What the served model can do."""

    num_blocks: int
    least_blocks: int
    """The smallest budget that can be named."""
    context: int
    """Tokens that prompt and answer may have together."""
    has_predictor: bool
    """Whether the budget `auto` can be asked for."""
    means: tuple[int, int] | None
    """The smallest and the largest mean of an answer that can be asked for, in blocks."""
    has_chat: bool
    """Whether it takes conversations."""
    least_ms_per_token: float
    engine: str


class ModelBody(_Reply):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["buddy"]
    root: str
    """The model without a budget in its name."""
    parent: None
    max_model_len: int
    """Tokens that prompt and answer may have together, as vLLM calls it."""
    buddy: ModelFacts


class ModelList(_Reply):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelBody]


class Tokenized(_Reply):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    """Tokens that prompt and answer may have together."""
    tokens: list[int]
    token_strs: NotRequired[list[str]]
    """The text of each, where they are asked for."""


class Detokenized(_Reply):
    """The text of token ids."""

    prompt: str


HealthStatus = Literal["ok", EngineState]


class Health(_Reply):
    """How the server is."""

    status: HealthStatus
