"""Requests of OpenAI's Responses API, which become chats: nothing is stored between them."""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from buddy.serving.http.bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Budget,
    CalledFunction,
    ChatBody,
    DraftsField,
    Function,
    FunctionName,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    RequestBody,
    ResponseFormat,
    Seed,
    TemplateVariables,
    TextPart,
    Tool,
    ToolCall,
    Unsupported,
)
from buddy.serving.http.refusals import Refusal

_MANY: Final = 2**31 - 1
_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
}
"""Fields of a chat, as a client of this API calls them."""


class Part(RequestBody):
    """A piece of a message's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Unsupported = None
    """There are none, nor any log-probabilities, in an answer that goes back."""
    logprobs: Unsupported = None


_Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MOST_MESSAGES)]


class Item(RequestBody):
    """A part of a conversation; one of an answer may go back as it came."""

    id: str | None = None
    """Taken, and not used, as the status is: nothing is stored."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class CallItem(Item):
    """A call of a function that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    """A JSON object, as text."""


class OutputItem(Item):
    """What a function that was called has given."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


class ReasoningText(RequestBody):
    """A piece of what was thought aloud."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """What the model has thought aloud."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MOST_MESSAGES)] | None = None
    summary: Unsupported = None
    """Refused, unless empty, as the following is: what was thought goes back as it came."""
    encrypted_content: Unsupported = None


class FunctionTool(RequestBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(RequestBody):
    """The function that is to be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(RequestBody):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(RequestBody):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(RequestBody):
    """How much is thought."""

    effort: str | None = None
    """A budget by name, where the server gives names to budgets."""
    summary: Literal["auto"] | None = None
    """There is none: what is thought comes as it is."""


def _type_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


_Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]


class ResponsesBody(RequestBody):
    """`POST /v1/responses`; null is as good as nothing."""

    model: str | None = None
    """The served model, or `MODEL@BUDGET`; may be left out."""
    input: str | Annotated[list[_Item], Field(min_length=1, max_length=MOST_MESSAGES - 1)]
    """A text of the user's, or messages, calls and what they gave."""
    instructions: str | None = None
    """A message of the system before them."""
    budget: Budget | None = None
    """Depth, as in a chat."""
    thinking_tokens: Annotated[int, Field(ge=0, le=_MANY)] | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=_MANY)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    drafts: DraftsField | None = None
    """What drafts, as in a chat."""
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    """Not given here: ask /v1/chat/completions."""
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Nothing is added: what is thought comes as it is, and goes back so."""
    store: bool | None = None
    """Nothing is stored, whatever it says, and the answer says so."""
    background: Literal[False] | None = None
    previous_response_id: Unsupported = None
    """Refused, as the following are: nothing is stored that could be gone on with."""
    conversation: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None

    def chat(self) -> ChatBody:
        """The chat that is asked for."""
        wanted = self.text.format if self.text is not None else None
        schema = None
        if wanted is not None and wanted.json_schema is not None:
            schema = JsonSchema(name=wanted.name, schema=wanted.json_schema)
        choice: Any = self.tool_choice
        if isinstance(choice, NamedChoice):
            choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
        return ChatBody(
            model=self.model,
            messages=self._messages(),
            budget=self.budget,
            thinking_tokens=self.thinking_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            drafts=self.drafts,
            stream=self.stream,
            response_format=None
            if wanted is None
            else ResponseFormat(type=wanted.type, json_schema=schema),
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _messages(self) -> list[Message]:
        messages = list[Message]()
        if self.instructions is not None:
            messages.append(Message(role="system", content=self.instructions))
        items = self.input
        if isinstance(items, str):
            return [*messages, Message(role="user", content=items)]
        answer = dict[str, Any]()
        """The message of the assistant: its thinking, text and calls are one in a chat."""
        for item in items:
            is_said = isinstance(item, MessageItem) and item.role == "assistant"
            if not (is_said or isinstance(item, CallItem | ReasoningItem)) or (
                is_said and "content" in answer
            ):
                messages += _assistant(answer)
                answer = {}
            if isinstance(item, ReasoningItem):
                answer["reasoning_content"] = "".join(part.text for part in item.content or ())
            elif isinstance(item, CallItem):
                called = CalledFunction(name=item.name, arguments=item.arguments)
                answer.setdefault("tool_calls", []).append(
                    ToolCall(id=item.call_id, function=called)
                )
            elif isinstance(item, OutputItem):
                messages.append(
                    Message(role="tool", content=_text(item.output), tool_call_id=item.call_id)
                )
            elif is_said:
                answer["content"] = _text(item.content)
            else:
                messages.append(Message(role=item.role, content=_text(item.content)))
        return [*messages, *_assistant(answer)]


def _assistant(answer: dict[str, Any]) -> list[Message]:
    return [Message(role="assistant", **answer)] if answer else []


def _text(content: str | list[Part]) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    return [TextPart(type="text", text=part.text) for part in content]


def _tool(tool: FunctionTool) -> Tool:
    given = tool.model_dump(include=set(Function.model_fields), exclude_unset=True)
    return Tool(type="function", function=Function(**given))


def named_as_response(refusal: Refusal) -> Refusal:
    """A chat's refusal, with the field as a client of this API calls it."""
    refusal.param = _NAMES.get(refusal.param or "", refusal.param)
    return refusal
