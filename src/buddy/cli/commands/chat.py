"""`buddy chat`: a conversation whose budget can change between turns."""

import sys

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.streams import read_line
from buddy.hub.presets import ROUTED_MODEL

_HELP = "/budget 0.5 changes the budget · /reset forgets the conversation · /exit leaves"


def chat(
    model: options.Model = ROUTED_MODEL,
    budget: options.Budget = None,
    prefill_budget: options.PrefillBudget = None,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    system: options.System = None,
    reroute: options.Reroute = "step",
    kv_policy: options.KVPolicy = None,
    policy: options.Policy = None,
    engine: options.Engine = "auto",
    quant: options.Quant = None,
) -> None:
    """Talk with a model. /budget 0.5 changes the budget, /reset forgets, /exit leaves.

    Each turn is routed anew from the whole conversation.
    """
    from buddy.budget.read import read_mean
    from buddy.cli.chat_session import ChatSession, Sampling, check_message
    from buddy.cli.views.display import show_summary, stderr
    from buddy.errors import BudgetError, PromptError

    console = stderr()
    opening = [] if system is None else [{"role": "system", "content": system}]
    for message in opening:
        check_message(**message)
    if sys.stdin is None:
        raise PromptError("stdin is closed: chat reads messages there")
    chat_session = ChatSession(
        model,
        policy=policy,
        kv_policy=kv_policy,
        reroute=reroute,
        engine=engine,
        quant=quant,
        budget=budget,
        prefill_budget=prefill_budget,
        console=console,
    )
    chat_session.check_chat()
    sampling = Sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    messages = list(opening)
    console.print(_HELP, style="dim")
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(opening)
            continue
        try:
            if line.startswith("/budget"):
                wanted = line.removeprefix("/budget").strip() or None
                blocks = chat_session.check_budget(wanted, prefill_budget)
                budget = wanted
                who = "token" if wanted and read_mean(wanted) else "turn"
                chosen = f"{wanted}: chosen for each {who}, up to"
                allowed = chosen if blocks is None else f"{blocks} of"
                console.print(f"{allowed} {chat_session.model.num_blocks} blocks", style="dim")
                continue
            if line.startswith("/"):
                console.print(_HELP, style="dim")
                continue
            asked = [*messages, {"role": "user", "content": line}]
            answer = chat_session.answer(
                asked, budget=budget, prefill_budget=prefill_budget, sampling=sampling
            )
        except (BudgetError, PromptError) as error:
            console.print(str(error), style="red", markup=False)
            continue
        messages = [*asked, {"role": "assistant", "content": answer.text}]
        if answer.trace.steps:
            show_summary(
                console,
                answer.trace,
                budget=budget,
                prefill_budget=prefill_budget,
                policy=chat_session.policy,
                kv_policy=chat_session.model.kv_policy,
                engine=chat_session.model.executor.describe(),
            )


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
