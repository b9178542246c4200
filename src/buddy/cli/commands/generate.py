"""`buddy generate`: one prompt, one answer, under a budget."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.streams import read_stdin
from buddy.cli.template_option import TemplateOptions, template_variables
from buddy.files import check_writable, write_text
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from buddy.cli.chat_session import Answer, ChatSession


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """What is shown and written besides the answer."""

    depth: Annotated[
        bool, typer.Option("--show-depth", help="Show which blocks ran for every token.")
    ] = False
    trace: Annotated[
        Path | None,
        options.checked(check_writable, help="Write the blocks of every token to this JSON file."),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer and its trace as JSON.")
    ] = False


@options.on_device
@options.grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from stdin.")],
    *,
    model: options.Model = ROUTED_MODEL,
    budgets: options.BudgetOptions,
    sampling: options.SamplingOptions,
    system: options.System = None,
    template_options: TemplateOptions = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
    routing: options.RoutingOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt with as many blocks as the budget allows.

    The text goes to stdout, everything else to stderr.

    Example: `buddy generate "What is a transformer?" --budget 0.75`
    """
    from buddy.cli.chat_session import ChatSession
    from buddy.cli.views.display import show_depth, stderr

    variables = template_variables(template_options)
    messages = _messages(prompt, system, variables, raw=raw)
    chat_session = ChatSession(model, routing, budgets, stderr(), variables)
    answer = chat_session.answer(messages, budgets, sampling, raw=raw, stream=not output.as_json)
    record = _record(answer, chat_session, model, budgets)
    if output.as_json:
        sys.stdout.write(json.dumps(record, allow_nan=False) + "\n")
    if output.trace is not None:
        write_text(output.trace, json.dumps(record, indent=1) + "\n")
    if output.depth:
        show_depth(chat_session.console, answer.token_texts, answer.trace)
    chat_session.show_summary(answer, budgets)
    if answer.interrupted:
        raise KeyboardInterrupt


def _messages(
    prompt: str, system: str | None, variables: dict[str, Any], *, raw: bool
) -> list[dict[str, str]]:
    """The conversation that is asked: a system message where there is any, and the prompt.

    Raises:
        PromptError: A message is empty or no text; or one, or a variable of the chat template, has
            no place in a raw prompt.
    """
    from buddy.cli.chat_session import check_message
    from buddy.errors import PromptError

    given = {"--system": system is not None, "--template-option": bool(variables)}
    for name in (name for name, is_given in given.items() if raw and is_given):
        raise PromptError(f"--raw uses no chat template, so {name} has no place: leave one out")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": read_stdin() if prompt == "-" else prompt})
    for message in messages:
        check_message(**message)
    return messages


def _record(
    answer: "Answer", chat_session: "ChatSession", model: str, budgets: options.BudgetOptions
) -> dict[str, Any]:
    """The answer for machines: text, what was asked, and the blocks of every token."""
    executor = chat_session.model.executor
    library = executor.library
    trace = answer.trace.to_json()
    steps = trace.pop("steps")
    resolved = chat_session.check_budget(budgets.request)
    blocks = steps[0]["executed"][0] if steps and resolved.is_auto else resolved.blocks
    each = {"prompt": resolved.prompt, "think": resolved.think, "answer": resolved.nominal}
    phase_blocks = {phase: count for phase, count in each.items() if count is not None}
    budget, prefill_budget = budgets.budget, budgets.prefill_budget
    return {
        "model": model,
        "budget": None if budget is None else budget.text,
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
            {
                "text": text,
                "blocks": step["blocks"][0],
                "executed": step["executed"][0],
                **({"phase": phase} if resolved.has_phases else {}),
            }
            for text, step, phase in zip(answer.token_texts, steps, answer.phases, strict=False)
        ],
        **({"phase_blocks": phase_blocks} if resolved.has_phases else {}),
        **({} if prefill_budget is None else {"prefill_budget": prefill_budget.text}),
    }


COMMAND = Command(name="generate", group="run", place=1, run=generate)
