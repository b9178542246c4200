"""Options that several commands share, alone or in groups; each checks its value when it is read.

A group is a frozen dataclass whose fields are options. A command that is `grouped` takes such
objects, and the command line has one flag for each field.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from buddy.budget.request import (
    Blocks,
    BudgetRequest,
    DefaultBudget,
    read_blocks,
    read_budget,
)
from buddy.cli.named import BUDGETS, model_option, offer, policies
from buddy.files import check_writable
from buddy.generation.drafts import Drafts, read_drafts
from buddy.settings import SEED, Range

MANY: Final = 2**31 - 1
"""No count of tokens, rows or rounds is larger."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options, whose fields typer then sees as options of its own."""
    groups: dict[str, Any] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            flat += inspect.signature(groups[name]).parameters.values()
        else:
            flat.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    return _taking(run, flat)


def _taking(
    run: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """The command, whose options typer then reads from these parameters."""
    keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # as inspect reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return run


def on_device(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take `--device`, and load its models there."""

    @wraps(command)
    def run(device: str | None, **values: Any) -> None:
        if device is None:
            command(**values)
            return
        from buddy.hub.device import VARIABLE, pick_devices

        pick_devices(device)
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = device
        try:
            command(**values)
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before

    asked = inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, annotation=Device)
    found = inspect.signature(command).parameters.values()
    return _taking(run, [*found, asked.replace(default=None)])


def checked(check: Callable[[Any], object], *names: str, help: str, **more: Any) -> Any:
    """An option whose values `check` may refuse, each of a list; none given is never refused."""

    def callback(value: Any) -> Any:
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None:
                check(item)
        return value

    return typer.Option(*names, help=help, callback=callback, **more)


def number(allowed: Range, *names: str, help: str, **more: Any) -> Any:
    """An option that takes a number of a range."""

    def check(value: int | float) -> None:
        if value not in allowed:
            raise typer.BadParameter(f"must be {allowed}, got {value}")

    return checked(check, *names, help=help, **more)


def count(least: int, *names: str, help: str, **more: Any) -> Any:
    """An option that takes a count of things."""
    return number(Range(least, MANY), *names, help=help, **more)


def seed(help: str) -> Any:
    """An option that takes a seed of random numbers."""
    return number(SEED, help=help)


def read_by(read: Callable[[str], Any], *names: str, help: str, **more: Any) -> Any:
    """An option that gives what a function reads in its text, or in each of a list."""

    def callback(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [read(text) for text in value]
        return None if value is None else read(value)

    # Typer takes a ValueError of a parser for its own, so that ours is not told: it parses text.
    return typer.Option(*names, help=help, parser=str, callback=callback, **more)


def _check_temperature(value: float) -> None:
    if value != 0 and value not in Range(1e-4, 1e4):
        raise typer.BadParameter(
            f"must be 0, which takes the likeliest token, or from 0.0001 to 10,000, got {value}"
        )


def parse_reroute(text: str) -> str | int:
    """`step` and `prefill` as they are, a number as a number; the engine refuses the rest."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text


# What follows imports torch, and does so only where the option is given.


def _check_reroute(text: str) -> None:
    if text != "step":
        from buddy.engine.run import check_reroute

        check_reroute(parse_reroute(text))


def _check_kv_policy(name: str) -> None:
    from buddy.engine.state.cache import check_kv_policy

    check_kv_policy(name)


def _check_engine(name: str) -> None:
    if name != "auto":
        from buddy.engine.executors.choice import check_engine

        check_engine(name)


def check_quant(name: str) -> None:
    """Refuse what is no quantisation by its option."""
    from buddy.backbone.quantised import check_quantisation

    check_quantisation(name)


def dtype(*formats: str, if_not_given: str) -> Any:
    """An option that takes a number format, one of these."""
    *first, last = formats
    known = f"{', '.join(first)} or {last}"

    def check(name: str) -> None:
        if name not in formats:
            raise typer.BadParameter(f"must be {known}, got {name!r}")

    return checked(
        check,
        help=f"Numbers of weights and sums: {known}. {if_not_given}",
        autocompletion=offer(*formats),
    )


def check_policy_spec(spec: str) -> None:
    """Refuse what is a policy of no model.

    Raises:
        PolicyError: No such policy.
    """
    from buddy.policies.registry import check_policy

    check_policy(spec)


def check_labelled_policy(text: str) -> None:
    """Refuse `SPEC` or `LABEL=SPEC` where the spec is no policy of any model."""
    from buddy.policies.registry import split_label

    check_policy_spec(split_label(text)[1])


DraftsOption = Annotated[
    Drafts | None,
    read_by(
        read_drafts,
        "--drafts",
        help="Draft tokens and verify them together, which changes no text: ngram drafts what "
        "followed the last tokens before, while it pays; 0.5 drafts at half depth; ngram+0.5 does "
        "both. None if not given.",
        autocompletion=offer("ngram", "ngram+0.5", "0.5"),
    ),
]
Model = Annotated[str, model_option("Preset, hub id, folder, GGUF file or Buddy checkpoint.")]
Budget = Annotated[
    BudgetRequest | None,
    read_by(
        read_budget,
        "--budget",
        "-b",
        help='Share of the blocks to run: 0.75, 75%, "18 blocks" or auto; mean:0.75 is a mean '
        "over the tokens of the answer; prompt:1.0,think:0.5,answer:0.75 is one for each phase. "
        "Full depth if not given.",
        autocompletion=offer(*BUDGETS),
    ),
]
PrefillBudget = Annotated[
    Blocks | None,
    read_by(
        read_blocks,
        help="Budget of the prompt's tokens, if another: 1.0 costs nothing in decoding.",
        autocompletion=offer(*BUDGETS[:5]),
    ),
]
MaxNewTokens = Annotated[
    int,
    count(1, "--max-new-tokens", "--max-tokens", help="Most tokens of an answer."),
]
ThinkingTokens = Annotated[
    int | None,
    count(0, help="Most tokens of thinking; its closing mark then ends it. All if not given."),
]
Temperature = Annotated[
    float, checked(_check_temperature, help="0 takes the likeliest token; higher is more random.")
]
TopP = Annotated[
    float, number(Range(above=0, high=1), help="Sample from this much probability, above 0 to 1.")
]
Seed = Annotated[int, seed("Seed of sampling.")]
System = Annotated[str | None, typer.Option(help="System message.")]
Reroute = Annotated[
    str,
    checked(
        _check_reroute,
        help="Choose blocks again every step (step), never (prefill), or every N steps.",
        autocompletion=offer("step", "prefill"),
    ),
]
KVPolicy = Annotated[
    str | None,
    checked(
        _check_kv_policy,
        help="What skipped blocks leave in the cache: zero, mask, project or lazy. The model's own "
        "if not given.",
        autocompletion=offer("zero", "mask", "project", "lazy"),
    ),
]
Engine = Annotated[
    str,
    checked(
        _check_engine,
        help="Who decodes: native (compiled code, CUDA graphs on a GPU), general, or auto: native "
        "if it can.",
        autocompletion=offer("auto", "native", "general"),
    ),
]
Quant = Annotated[
    str | None,
    checked(
        check_quant,
        help="Weights in fewer bits: int8 or int4. As they are if not given.",
        autocompletion=offer("int8", "int4"),
    ),
]
Dtype = Annotated[
    str | None, dtype("bfloat16", "float16", "float32", if_not_given="As saved if not given.")
]
Policy = Annotated[
    str | None,
    checked(
        check_policy_spec,
        help="Who chooses the blocks: routed, static, static:12,11,20, static:FILE.json, "
        "searched:FILE.json, random:SEED, full, or a method such as layerskip. The model's "
        "own if not given.",
        autocompletion=policies,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Where the model is: cpu, cuda, cuda:1 or mps. Several, cuda:0,cuda:1, share its "
        "blocks; auto is all of CUDA. The first GPU of CUDA if not given, else the CPU.",
        autocompletion=offer("auto", "cpu", "cuda", "mps"),
    ),
]
Text = Annotated[str, typer.Option(help="wikitext2, ptb or a text file.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the named corpora.")]
RecordOut = Annotated[Path, checked(check_writable, help="Where the RunRecord goes (JSON).")]

DEFAULT_MAX_NEW_TOKENS: Final = 256

Recipe = Annotated[Path, typer.Argument(help="TOML file; see recipes/.", show_default=False)]
RunFolder = Annotated[Path, typer.Option(help="Folder for checkpoint, logs and training state.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optim.steps=250."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the training state in --out.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOptions:
    """How many blocks may run, in the answer and in its prompt."""

    budget: Budget = None
    prefill_budget: PrefillBudget = None

    @property
    def request(self) -> BudgetRequest:
        """Both as one budget.

        Raises:
            BudgetError: Prompt and answer cannot have a budget each.
        """
        return (self.budget or DefaultBudget()).with_prefill(self.prefill_budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How tokens are chosen, and when to stop."""

    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS
    thinking_tokens: ThinkingTokens = None
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed = 0

    def for_generate(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`; answers stream, so there are no beams."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "thinking_tokens": self.thinking_tokens,
            "num_beams": 1,
            "num_return_sequences": 1,
            "do_sample": self.temperature != 0,
        }
        if self.temperature != 0:
            arguments |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionOptions:
    """Who chooses the blocks, and what executes them in which numbers."""

    kv_policy: KVPolicy = None
    policy: Policy = None
    engine: Engine = "auto"
    quant: Quant = None
    dtype: Dtype = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationOptions:
    """The text that blocks are measured on, and in what pieces."""

    text: Text = "wikitext2"
    data_dir: DataDir = None
    windows: Annotated[int, count(1, "--limit", "--windows", help="Most windows of text.")] = 32
    tokens: Annotated[int, count(2, help="Tokens of a window.")] = 512
    batch: Annotated[int, count(1, help="Windows at a time.")] = 4
    dtype: Dtype = None


FULL: Final = ExecutionOptions(policy="full")
"""What measures the blocks themselves, and chooses none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingOptions(ExecutionOptions):
    """The same, how often blocks are chosen again, and what drafts."""

    reroute: Reroute = "step"
    drafts: DraftsOption = None
