"""The JSON of requests: OpenAI's, vLLM's, and what of it is ours.

A known field with a wrong value is refused: numbers are not read from strings, and every number has
a range. Unknown ones are kept apart, for `unknown_fields`. Reading ends at the first item of a list
that is wrong, as each fault takes a thousand times what it is written in.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from buddy.serving.http.refusals import Refusal, not_json, refusal_of_validation

MOST_ANSWERS: Final = 16
"""Answers to one prompt (`n`)."""
MOST_PROMPTS: Final = 64
"""Prompts of one request."""
MOST_TOOLS: Final = 256
"""Tools of a request, and calls of a message."""
MOST_MESSAGES: Final = 4096
"""Messages of a conversation, and texts of a message."""
_MOST_FIELDS: Final = 4096
"""Fields of a JSON object."""
_MOST_STOPS: Final = 16
_MOST_STOP_TOKENS: Final = 256
_MOST_BIASES: Final = 1024
_MANY: Final = 2**31 - 1
_SEED: Final = 2**63 - 1

TemplateVariables = Annotated[dict[str, Any], Field(max_length=64)]
Seed = Annotated[int, Field(ge=-_SEED, le=_SEED)]
FunctionName = Annotated[str, Field(min_length=1, max_length=256)]
"""The name of a function that a model may call."""
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Stops = Annotated[list[_Stop], Field(fail_fast=True, max_length=_MOST_STOPS)]
_TokenId = Annotated[int, Field(ge=0, le=_MANY)]
_TokenIds = Annotated[list[_TokenId], Field(fail_fast=True, min_length=1)]

Budget = _Number | str | dict[str, _Number | str]
"""What `buddy.serving.http.budget_rules` reads."""
DraftsField = _Number | str
"""What `buddy.serving.http.draft_rules` reads."""


def _empty(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value or is_number:
        raise PydanticCustomError("unsupported", "not supported here: leave it out")
    return value


Unsupported = Annotated[
    Any, AfterValidator(_empty), WithJsonSchema({"enum": [None, False, "", [], {}]})
]
"""A field of OpenAI's that may be there as long as it asks for nothing."""


class RequestBody(BaseModel):
    """A part of a request; fields that it does not know are kept apart."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, use_attribute_docstrings=True
    )


class TextPart(RequestBody):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(RequestBody):
    """A function that a model has called."""

    name: FunctionName
    arguments: str
    """A JSON object, as text."""


class ToolCall(RequestBody):
    """A call of a tool, in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None
    ) = Field(default=None, validate_default=True)
    """May be null in an assistant's message, where it called a tool, say."""
    name: str | None = None
    """Name of who speaks, for templates that have a place for it."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = (
        None
    )
    """Tools that the assistant called."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    reasoning_content: str | None = None
    """What the assistant thought first, for templates that have a place for it."""
    refusal: Unsupported = None
    """What answers of OpenAI's have besides text; refused, unless empty."""
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @field_validator("content")
    @classmethod
    def _has_text(cls, content: Any, info: Any) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("no_text", "null is for an assistant's message alone")
        return content

    @field_validator("tool_calls", "tool_call_id", "reasoning_content")
    @classmethod
    def _is_its_own(cls, value: Any, info: Any) -> Any:
        whose = "tool" if info.field_name == "tool_call_id" else "assistant"
        if value and info.data.get("role") != whose:
            raise PydanticCustomError("no_place", f"is for messages of the role {whose} alone")
        return value

    @property
    def text(self) -> str:
        """All of its content."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class Function(RequestBody):
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; any object if not given."""
    strict: bool | None = None
    """Its arguments always follow the schema, if it can be followed; with true it must be."""


class Tool(RequestBody):
    """A tool that a model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(RequestBody):
    """The name of a function."""

    name: FunctionName


class NamedTool(RequestBody):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(RequestBody):
    """What a stream has besides text."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    include_depth: bool | None = None
    """Each chunk says which blocks made its tokens."""
    include_obfuscation: Literal[False] | None = None
    """Nothing hides the length of a chunk."""


class JsonSchema(RequestBody):
    """A JSON schema that the answer obeys."""

    name: str | None = None
    description: str | None = None
    """Taken, and not used, as the name is."""
    strict: bool | None = None
    """A schema is always followed to the letter."""
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(RequestBody):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class RequestFields(RequestBody):
    """The fields that both kinds of request have; null is as good as nothing."""

    model: str | None = None
    """The served model, or `MODEL@BUDGET`; may be left out."""
    budget: Budget | None = None
    """0.6, "60%", "18 blocks", "auto", {"prompt": 1.0, "answer": 0.5},
    {"prompt": 1.0, "think": 0.5, "answer": 1.0}, {"mean": 0.7}, {"ms_per_token": 12} or
    {"tokens_per_s": 80}; but for a mean, an object may also have min and max."""
    thinking_tokens: Annotated[int, Field(ge=0, le=_MANY)] | None = None
    """Most tokens that an answer may think for; the model's closing mark then ends its thinking."""
    reasoning_effort: str | None = None
    """A budget by name, where the server gives names to budgets."""
    stream: bool | None = None
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MANY)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 = the best token."""
    top_k: Annotated[int, Field(ge=-1, le=_MANY)] | None = None
    """Tokens that are drawn from; 0 and -1 = all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Field(max_length=_MOST_BIASES)] | None = None
    """Token ids, written as strings, and what is added to their logits."""
    seed: Seed | None = None
    """The same text for the same request, on one machine; its prompt is not taken from a cache."""
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=_MOST_STOPS)] | None = (
        None
    )
    """Strings that end the answer; one that is a special token of the model's also ends it so."""
    stop_token_ids: (
        Annotated[list[_TokenId], Field(fail_fast=True, max_length=_MOST_STOP_TOKENS)] | None
    ) = None
    """Tokens that end the answer and are no part of its text."""
    min_tokens: Annotated[int, Field(ge=0, le=_MANY)] | None = None
    """Tokens before which nothing ends the answer: neither its end, nor stop, nor its tokens."""
    skip_special_tokens: bool | None = None
    """Whether special tokens, such as <|im_start|>, are left out of the text; true if not given."""
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the prompt's tokens, and so many alternatives of each; not streamed."""
    response_format: ResponseFormat | None = None
    drafts: DraftsField | None = None
    """What tokens are drafted from before they are verified together, while it pays: "ngram" drafts
    what followed the last tokens where they stood before, a budget such as 0.4 or "12 blocks" what
    these blocks say, "ngram+0.4" the second where the first says nothing. The text is the same."""
    ignore_eos: bool | None = None
    """Go on to `max_tokens`; for load tests."""


_Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


class ConversationFields(RequestBody):
    """What a chat template is told beside the messages."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    """Functions that the model may call, if its chat template knows tools."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Whether it calls any; "auto" if not given."""
    parallel_tool_calls: bool | None = None
    """Whether it may call several at once; true if not given."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the model's chat template, such as enable_thinking: what lets a model think
    aloud first, as it has not been trained to under a budget."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where an answer begins; true if not given."""
    continue_final_message: bool | None = None
    """Go on with the last message, in the place of a new one."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own to the text, such as a beginning of text; false if not
    given, as templates have them."""


class ChatBody(ConversationFields, RequestFields):
    """`POST /v1/chat/completions`."""

    messages: _Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MANY)] | None = None
    """Goes before `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    functions: list[Any] | None = None
    """Refused, unless empty: an older name of tools."""
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    """Nothing is stored."""


class TokenizeBody(ConversationFields):
    """`POST /tokenize`: a text or a conversation."""

    model: str | None = None
    """Model, as in a chat, though a budget says nothing here."""
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own; by default it does to a text, and not to a
    conversation."""
    return_token_strs: bool | None = None
    """Whether tokens come as texts too."""


class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    """Model, as in a chat, though a budget says nothing here."""
    tokens: _TokenIds


class CompletionBody(RequestFields):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | _TokenIds
        | Annotated[list[_TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own to a text, such as a beginning of text; true if not
    given."""
    max_tokens: Annotated[int, Field(ge=0, le=_MANY)] | None = None
    """0 = none, where the prompt is echoed or scored."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likeliest tokens told beside each token of the answer; with echo, of the prompt too."""
    echo: bool | None = None
    """Begin the answer with the prompt."""
    suffix: str | None = None
    """Refused, unless empty."""
    best_of: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    """Refused, unless it is `n`."""


_Read = TypeVar("_Read", bound=BaseModel)


def read_body(kind: type[_Read], content: bytes) -> _Read:
    """The body of a request.

    Raises:
        Refusal: It is no JSON, or not what is expected.
    """
    try:
        given = json.loads(content, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if isinstance(error, Refusal):
            raise
        raise not_json("and it cannot be read") from error
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise refusal_of_validation(error.errors(include_url=False), given) from error


def _object(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields) > _MOST_FIELDS:
        raise Refusal(
            400, f"a JSON object has {len(fields):,} fields: expected at most {_MOST_FIELDS:,}"
        )
    return dict(fields)
