"""`buddy chat`: a conversation whose budget can change between turns."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from buddy.budget.request import read_budget
from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.template_option import TemplateOptions, template_variables
from buddy.cli.typed_lines import typed_lines
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from buddy.cli.chat_session import ChatSession

_HINT: Final = "/help lists what can be typed; Ctrl-D ends"
_HELP: Final = """\
/budget 0.5   changes the budget
/reset        forgets the conversation
/save FILE    writes the conversation, a JSON list of messages
/load FILE    goes on from a conversation that was saved
/help         shows this
/exit         ends; so do Ctrl-D, and Ctrl-C twice at an empty prompt
Ctrl-C        clears the line; while the model answers, ends the answer"""
_ROLES: Final = ("system", "user", "assistant")
_HISTORY: Final = "chat-history"


@options.on_device
@options.grouped
def chat(
    *,
    model: options.Model = ROUTED_MODEL,
    budgets: options.BudgetOptions,
    sampling: options.SamplingOptions,
    system: options.System = None,
    template_options: TemplateOptions = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history/--no-history", help="Keep the lines that are typed for later sessions."
        ),
    ] = True,
    routing: options.RoutingOptions,
) -> None:
    """Talk with a model. /help lists what can be typed.

    Each turn is routed anew from the whole conversation. Ctrl-C ends an answer and keeps what was
    said; Ctrl-D ends the conversation.

    Example: `buddy chat --budget 0.75 --system "Answer in one sentence."`
    """
    from buddy.cli.chat_session import ChatSession, check_message
    from buddy.cli.views.display import stderr
    from buddy.errors import BudgetError, PromptError, ResultError
    from buddy.hub.folder import state_home

    opening = [] if system is None else [{"role": "system", "content": system}]
    for message in opening:
        check_message(**message)
    if sys.stdin is None:
        raise PromptError("stdin is closed: chat reads messages there")
    variables = template_variables(template_options)
    chat_session = ChatSession(model, routing, budgets, stderr(), variables)
    chat_session.check_chat()
    chat_session.prepare_engine()
    conversation, console = Conversation(chat_session, opening, budgets, sampling), stderr()
    runs = f"kv {chat_session.model.kv_policy} · {chat_session.model.executor.describe()}"
    console.print(f"{model} · {chat_session.policy} · {runs}\n{_HINT}", style="dim")
    for line in typed_lines(console, state_home() / _HISTORY if history else None):
        if line in ("/exit", "/quit"):
            break
        try:
            conversation.read(line)
        except (BudgetError, PromptError, ResultError) as error:
            console.print(str(error), style="red")
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            console.print("stopped; nothing was answered", style="dim")


class Conversation:
    """The messages so far, and the budget of the next turn.

    Args:
        chat_session: Who answers.
        opening: What the conversation begins with, again after /reset.
        budgets: Those of the command line.
        sampling: How tokens of every answer are chosen.
    """

    def __init__(
        self,
        chat_session: "ChatSession",
        opening: list[dict[str, str]],
        budgets: options.BudgetOptions,
        sampling: options.SamplingOptions,
    ) -> None:
        self._session, self._opening, self._sampling = chat_session, opening, sampling
        self._budgets = budgets
        self._messages = list(opening)
        self._commands: dict[str, Callable[[str], None]] = {
            "/budget": self._change_budget,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
        }

    def read(self, line: str) -> None:
        """Do what a line asks: answer it, or follow the command that it is.

        Raises:
            BudgetError: The budget cannot be read or spent; the one before stays.
            PromptError: The message cannot be answered and is forgotten; or there is no saved
                conversation to read.
            ResultError: The conversation cannot be written.
        """
        name, _, value = line.partition(" ")
        if not line.startswith("/"):
            self._answer(line)
        elif name in self._commands:
            self._commands[name](value.strip())
        else:
            self._say(_HELP)

    def _say(self, text: str) -> None:
        self._session.console.print(text, style="dim")

    def _reset(self, _: str) -> None:
        self._messages = list(self._opening)
        self._say("forgotten")

    def _save(self, name: str) -> None:
        """Write the messages; a file that is no conversation is never replaced."""
        from buddy.files import write_text

        path = _file(name, "/save")
        if path.exists():
            _read_messages(path)
        write_text(path, json.dumps(self._messages, ensure_ascii=False, indent=1) + "\n")
        self._say(f"{len(self._messages)} messages in {path}")

    def _load(self, name: str) -> None:
        path = _file(name, "/load")
        self._messages = _read_messages(path)
        self._say(f"{len(self._messages)} messages of {path}")

    def _change_budget(self, text: str) -> None:
        budget = text or None
        budgets = replace(self._budgets, budget=read_budget(budget))
        resolved = self._session.check_budget(budgets.request)
        self._budgets = budgets
        num_blocks = self._session.model.num_blocks
        if resolved.blocks is not None or resolved.think is not None:
            self._say(f"{resolved.most} of {num_blocks} blocks{resolved.title}")
            return
        who = "turn" if resolved.is_auto else "token"
        predictor = self._session.model.predictor
        measured = None if predictor is None or not resolved.is_auto else predictor.constant
        note = "" if measured is None else measured.note
        self._say(f"{budget}: chosen for each {who}, up to {num_blocks} blocks{note}")

    def _answer(self, line: str) -> None:
        from buddy.cli.views.display import show_footer

        messages = [*self._messages, {"role": "user", "content": line}]
        answer = self._session.answer(messages, self._budgets, self._sampling)
        if answer.interrupted and not answer.text:  # such a question is not part of the talk
            raise KeyboardInterrupt
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if answer.trace.steps:
            console, budget = self._session.console, self._budgets.budget
            show_footer(console, answer.trace, budget, is_stopped=answer.interrupted)


def _file(name: str, command: str) -> Path:
    from buddy.errors import PromptError
    from buddy.hub.safe_paths import user_path

    if not name:
        raise PromptError(f"{command} needs the name of a file, as in {command} talk.json")
    return user_path(name)


def _read_messages(path: Path) -> list[dict[str, str]]:
    """The messages of a file that `/save` wrote.

    Raises:
        PromptError: It cannot be read, or is none.
    """
    from buddy.errors import PromptError
    from buddy.files import read_json

    messages: Any = read_json(path, PromptError)
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise PromptError(
            f"{path} is no saved conversation: expected a JSON list of messages, each with a role "
            f"({', '.join(_ROLES)}) and a content; name another file"
        )
    return messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )


COMMAND = Command(name="chat", group="run", place=2, run=chat)
