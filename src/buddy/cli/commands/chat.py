"""`buddy chat`: a conversation whose budget can change between turns."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from buddy.budget.request import read_budget
from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.streams import read_line
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from buddy.cli.chat_session import ChatSession

_HELP = "/budget 0.5 changes the budget · /reset forgets the conversation · /exit leaves"


@options.grouped
def chat(
    *,
    model: options.Model = ROUTED_MODEL,
    budgets: options.BudgetOptions,
    sampling: options.SamplingOptions,
    system: options.System = None,
    routing: options.RoutingOptions,
) -> None:
    """Talk with a model. /budget 0.5 changes the budget, /reset forgets, /exit leaves.

    Each turn is routed anew from the whole conversation.
    """
    from buddy.cli.chat_session import ChatSession, check_message
    from buddy.cli.views.display import stderr
    from buddy.errors import BudgetError, PromptError

    opening = [] if system is None else [{"role": "system", "content": system}]
    for message in opening:
        check_message(**message)
    if sys.stdin is None:
        raise PromptError("stdin is closed: chat reads messages there")
    chat_session = ChatSession(model, routing, budgets, stderr())
    chat_session.check_chat()
    conversation = Conversation(chat_session, opening, budgets, sampling)
    chat_session.console.print(_HELP, style="dim")
    while (line := _read_line()) not in (None, "/exit", "/quit"):
        try:
            conversation.read(line)
        except (BudgetError, PromptError) as error:
            chat_session.console.print(str(error), style="red", markup=False)


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

    def read(self, line: str) -> None:
        """Do what a line asks: answer it, or follow the command that it is.

        Raises:
            BudgetError: The budget cannot be read or spent; the one before stays.
            PromptError: The message cannot be answered; it is forgotten.
        """
        if line == "/reset":
            self._messages = list(self._opening)
        elif line.startswith("/budget"):
            self._change_budget(line.removeprefix("/budget").strip() or None)
        elif line.startswith("/"):
            self._session.console.print(_HELP, style="dim")
        else:
            self._answer(line)

    def _change_budget(self, budget: str | None) -> None:
        budgets = replace(self._budgets, budget=read_budget(budget))
        resolved = self._session.check_budget(budgets.request)
        self._budgets = budgets
        who = "turn" if resolved.is_auto else "token"
        chosen = f"{budget}: chosen for each {who}, up to"
        allowed = chosen if resolved.blocks is None else f"{resolved.blocks} of"
        num_blocks = self._session.model.num_blocks
        self._session.console.print(f"{allowed} {num_blocks} blocks", style="dim")

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        answer = self._session.answer(messages, self._budgets, self._sampling)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._session.show_summary(answer, self._budgets)


def _read_line() -> str | None:
    """One line that says something; None at the end of input. Ctrl-C leaves."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("\n> ")
            sys.stderr.flush()
        line = read_line()
        if line is None or line.strip():
            return line and line.strip()


COMMAND = Command(name="chat", group="run", place=2, run=chat)
