"""The JSON of requests and answers: OpenAI's, and what of it is ours.

An unknown field is ignored, as OpenAI does. A known field with a wrong value is refused: numbers
are not read from strings, and every number has a range.
"""

from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from buddy.serving.client import EngineState
from buddy.serving.request import FinishReason

MOST_ANSWERS: Final = 16
"""Answers to one prompt (`n`)."""
MOST_PROMPTS: Final = 64
"""Prompts of one request."""
_MOST_STOPS: Final = 16
_MOST_BIASES: Final = 1024
_MANY: Final = 2**31 - 1
_SEED: Final = 2**63 - 1

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_TokenId = Annotated[int, Field(ge=0, le=_MANY)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1)]

Budget = _Number | str | dict[str, _Number | str]
"""What `buddy.serving.http.budget_rules` reads."""


class _Body(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True
    )


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(_Body):
    """What a stream has besides text."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    include_depth: bool | None = None
    """Each chunk says which blocks made its tokens."""


class JsonSchema(_Body):
    """A JSON schema that the answer obeys."""

    name: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class RequestFields(_Body):
    """The fields that both kinds of request have; null is as good as nothing."""

    model: str | None = None
    """The served model, or `MODEL@BUDGET`; may be left out."""
    budget: Budget | None = None
    """0.6, "60%", "18 blocks", "auto", {"prefill": 1.0, "decode": 0.5}, {"mean": 0.7},
    {"ms_per_token": 12} or {"tokens_per_s": 80}; but for a mean, an
    object may also have min and max."""
    reasoning_effort: str | None = None
    """A budget by name, where the server gives names to budgets."""
    stream: bool | None = None
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MANY)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MANY)] | None = None
    """Tokens that are drawn from; 0 and -1 = all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=_MOST_BIASES)] | None = None
    """Token ids, written as strings, and what is added to their logits."""
    seed: Annotated[int, Field(ge=-_SEED, le=_SEED)] | None = None
    """The same text for the same request, on one machine; its prompt is not taken from a cache."""
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MOST_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    """Taken, and not used."""
    ignore_eos: bool | None = None
    """Go on to `max_tokens`; for load tests."""


class ChatBody(RequestFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MANY)] | None = None
    """Goes before `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    """Refused, unless empty: this server calls no tools."""
    functions: list[Any] | None = None
    """Refused, unless empty."""


class CompletionBody(RequestFields):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | _TokenIds
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    """Refused, if true."""
    suffix: str | None = None
    """Refused, unless empty."""
    best_of: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    """Refused, unless it is `n`."""


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
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AnswerMessage(_Reply):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Reply):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class CompletionChoice(_Reply):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class ChatDelta(_Reply):
    """New text of an answer: the first has the role, and the last may have nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatPart(_Reply):
    """What came of an answer; the last says why it ended."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionPart(_Reply):
    """What came of an answer; the last says why it ended."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


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


class Completion(Head):
    """Answers to prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageBody


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
    buddy: ModelFacts


class ModelList(_Reply):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelBody]


HealthStatus = Literal["ok", EngineState]


class Health(_Reply):
    """How the server is."""

    status: HealthStatus
