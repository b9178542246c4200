"""The model of a command: by `--model`, or by its place; and what a shell offers for an option."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.main import get_command

BUDGETS: Final = ("1.0", "0.875", "0.75", "0.625", "0.5", "auto", "mean:0.75")
"""Budgets that a shell offers; there are as many others as a model has blocks."""
POLICIES: Final = ("routed", "static", "searched", "random", "full")


def offer(*words: str) -> Callable[[], list[str]]:
    """What gives a shell the words that complete a value; it takes those that begin as typed."""
    return lambda: list(words)


def policies() -> list[str]:
    """The policies of the product and the methods of this package, without importing any."""
    spec = find_spec("buddy.methods")
    folders = (spec and spec.submodule_search_locations) or []
    methods = [file.parent.name for folder in folders for file in Path(folder).glob("*/method.py")]
    return [*POLICIES, *sorted(name.replace("_", "-") for name in methods)]


def models() -> list[str]:
    """Presets, converted models, and the models of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from buddy.hub.folder import model_dirs
    from buddy.hub.presets import PRESETS

    cached = sorted(Path(HF_HUB_CACHE).glob("models--*--*"))
    on_hub = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in cached]
    return list(dict.fromkeys([*PRESETS, *(folder.name for folder in model_dirs()), *on_hub]))


def _keep(context: Any, value: str | None) -> str | None:
    """Leave the model that is named by its place to `_take`, which is called later."""
    if value is not None:
        context.obj = value
    return value


def _take(context: Any, value: str | None) -> str | None:
    """The model by `--model`, by its place, or by default.

    Raises:
        BadParameter: It is named twice, or not at all where there is no default.
    """
    if context.resilient_parsing:
        return value
    placed = context.obj
    source = context.get_parameter_source("model")
    if placed is not None and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(f"is given twice, {placed!r:.80} and {value!r:.80}: leave one out")
    if placed is None and value is None:
        raise typer.BadParameter("name a model: `buddy models` lists those on this machine")
    return value if placed is None else placed


def model_option(help: str) -> Any:
    """The option that names a model. Where nothing else has a place, the model may stand there."""
    return typer.Option("--model", "-m", help=help, callback=_take, autocompletion=models)


def _only_place(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="model",
            help="The same as --model.",
            callback=_keep,
            autocompletion=models,
            expose_value=False,
            is_eager=True,  # it is there when the option is read
        ),
    ] = None,
) -> None:
    pass


@cache
def _place() -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(_only_place)
    [place, *_] = get_command(app).params
    return place


def let_model_stand_alone(command: Any) -> None:
    """Let a model be named by its place in a command that has no other argument."""
    takes = any(value.name == "model" and value.callback for value in command.params)
    if takes and not any(value.param_type_name == "argument" for value in command.params):
        command.params.insert(0, _place())
