"""Tools that a chat may call, and what follows for its prompt, its grammar and its reading."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from buddy.serving.http.bodies import ConversationFields, Message, NamedTool, Tool
from buddy.serving.http.call_grammar import call_grammar
from buddy.serving.http.prompts import Conversation, PromptReader
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.speech import Speech
from buddy.serving.http.thinking import ThinkingReader
from buddy.serving.http.tool_calls import CallReader
from buddy.serving.json_schema import can_follow
from buddy.serving.request import Grammar, Thought

_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CalledTools:
    """Tools of a request that may be called.

    Attributes:
        told: All that the model is told of.
        allowed: Those that it may call: one, where the request names it.
        is_required: Whether it must.
        is_single: Whether it may call once at most.
    """

    told: Sequence[Tool] = ()
    allowed: Sequence[Tool] = ()
    is_required: bool = False
    is_single: bool = False


def called_tools(body: ConversationFields) -> CalledTools:
    """The tools that an answer may call.

    Raises:
        Refusal: One must be called that is not there, or two have the same name.
    """
    tools, choice = body.tools or (), body.tool_choice
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _refused("tools", f"two tools are called {twice!r}: expected different names")
    if choice == "none" or (choice in (None, "auto") and not tools):
        return CalledTools()
    allowed = tools
    if isinstance(choice, NamedTool):
        allowed = [tool for tool in tools if tool.function.name == choice.function.name]
        if not allowed:
            raise _refused(
                "tool_choice", f"there is no tool {choice.function.name!r} among tools: name one"
            )
    elif not tools:
        raise _refused("tool_choice", f'tool_choice "{choice}" needs tools: name some')
    is_single = isinstance(choice, NamedTool) or body.parallel_tool_calls is False
    return CalledTools(tools, allowed, choice not in (None, "auto"), is_single)


def conversation(
    body: ConversationFields, messages: Sequence[Message], called: CalledTools
) -> Conversation:
    """What a chat template is to write.

    Raises:
        Refusal: An answer is to begin and the last message to go on.
    """
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise _refused(
            "add_generation_prompt",
            "continue_final_message goes on with the last message, and add_generation_prompt "
            "begins another: set one of the two",
        )
    opens = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    return Conversation(
        messages=messages,
        tools=[tool.model_dump(exclude_unset=True) for tool in called.told],
        variables=body.chat_template_kwargs or {},
        opens_answer=opens,
        goes_on=goes_on,
        adds_special=bool(body.add_special_tokens),
    )


def chat_grammar(
    called: CalledTools, answer: Grammar | None, prompt: Sequence[int], reader: PromptReader
) -> Grammar | None:
    """What the answer must be: calls, if it has any, whose arguments follow the tools' schemas.

    Args:
        called: Tools that it may call.
        answer: What an answer must be that calls none.
        prompt: Token ids.
        reader: Knows the model's marks.
    """
    grammar = answer
    if called.allowed:
        schema = None
        if answer is not None:
            schema = _ANY_OBJECT if answer.schema is None else json.loads(answer.schema)
        assert reader.calls is not None
        lark = call_grammar(
            reader.calls,
            {tool.function.name: _schema(tool, called) for tool in called.allowed},
            reader.added,
            is_required=called.is_required,
            is_single=called.is_single,
            answer=schema,
        )
        grammar = Grammar(lark=lark, param="tools")
    marks = reader.thinking
    if grammar is None or marks is None or marks.is_closed(prompt):
        return grammar
    return replace(grammar, after=Thought.of(marks, prompt))


def _schema(tool: Tool, called: CalledTools) -> dict[str, Any]:
    """The schema that the arguments of a call will follow.

    One that no grammar can follow is left to the model where it need not call the tool, unless the
    tool is strict. Elsewhere the engine refuses it.
    """
    schema = tool.function.parameters or _ANY_OBJECT
    is_needed = called.is_required or tool.function.strict
    return schema if is_needed or can_follow(schema) else _ANY_OBJECT


def shown_marks(called: CalledTools, reader: PromptReader) -> frozenset[int]:
    """Special tokens of a chat's answer that are text to whoever parts it."""
    marks = [reader.thinking.opens, reader.thinking.closes] if reader.thinking else []
    if called.allowed and reader.calls is not None:
        marks += [reader.calls.mark, reader.calls.closes]
    return frozenset(reader.special[mark] for mark in marks if mark in reader.special)


def speech_of(called: CalledTools, prompt: Sequence[int], reader: PromptReader) -> Speech:
    """What parts the text of an answer to a prompt."""
    thinking, calls = None, None
    if (marks := reader.thinking) is not None:
        thinking = ThinkingReader(marks, is_open=marks.is_open(prompt))
    if called.allowed and reader.calls is not None:
        calls = CallReader(reader.calls, 1 if called.is_single else None)
    return Speech(thinking, calls)


def _refused(param: str, message: str) -> Refusal:
    return Refusal(400, message, param=param, code="invalid_value")
