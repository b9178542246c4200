"""`buddy generate`: one prompt, one answer, under a budget."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.budget.read import read_mean
from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.streams import read_stdin
from buddy.files import check_writable, write_text
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from buddy.cli.chat_session import Answer, ChatSession


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from stdin.")],
    model: options.Model = ROUTED_MODEL,
    budget: options.Budget = None,
    prefill_budget: options.PrefillBudget = None,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
    reroute: options.Reroute = "step",
    kv_policy: options.KVPolicy = None,
    policy: options.Policy = None,
    engine: options.Engine = "auto",
    quant: options.Quant = None,
    depth: Annotated[
        bool, typer.Option("--show-depth", help="Show which blocks ran for every token.")
    ] = False,
    trace: Annotated[
        Path | None,
        options.checked(check_writable, help="Write the blocks of every token to this JSON file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer and its trace as JSON.")
    ] = False,
) -> None:
    """Answer one prompt with as many blocks as the budget allows.

    The text goes to stdout, everything else to stderr.
    """
    from buddy.cli.chat_session import ChatSession, Sampling, check_message
    from buddy.cli.views.display import show_depth, show_summary, stderr
    from buddy.errors import PromptError

    console = stderr()
    if raw and system is not None:
        raise PromptError("--raw uses no chat template, so --system has no place: leave one out")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": read_stdin() if prompt == "-" else prompt})
    for message in messages:
        check_message(**message)
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
    answer = chat_session.answer(
        messages,
        budget=budget,
        prefill_budget=prefill_budget,
        sampling=Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
        ),
        raw=raw,
        stream=not as_json,
    )
    record = _record(answer, chat_session, model=model, budget=budget)
    if prefill_budget is not None:
        record["prefill_budget"] = prefill_budget
    if as_json:
        sys.stdout.write(json.dumps(record, allow_nan=False) + "\n")
    if trace is not None:
        write_text(trace, json.dumps(record, indent=1) + "\n")
    if depth:
        show_depth(console, answer.token_texts, answer.trace)
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
    if answer.interrupted:
        raise KeyboardInterrupt


def _record(
    answer: "Answer", chat_session: "ChatSession", *, model: str, budget: str | None
) -> dict[str, Any]:
    """The answer for machines: text, what was asked, and the blocks of every token."""
    executor = chat_session.model.executor
    library = executor.library
    trace = answer.trace.to_json()
    steps = trace.pop("steps")
    blocks = chat_session.check_budget(budget)
    if blocks is None and steps and read_mean(budget) is None:
        blocks = steps[0]["executed"][0]
    return {
        "model": model,
        "budget": budget,
        "budget_blocks": blocks,
        "policy": chat_session.policy,
        "kv_policy": chat_session.model.kv_policy,
        "reroute": chat_session.reroute,
        "engine": answer.trace.decode_engine or executor.name,
        "engine_reason": executor.why_general,
        "instructions": executor.instructions,
        "compile_s": None if library is None else library.compile_s,
        "quant": chat_session.model.origin.quant,
        "prior": chat_session.model.prior_facts,
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.token_texts),
        **trace,
        "tokens": [
            {"text": text, "blocks": step["blocks"][0], "executed": step["executed"][0]}
            for text, step in zip(answer.token_texts, steps, strict=False)
        ],
    }


COMMAND = Command(name="generate", group="run", place=1, run=generate)
