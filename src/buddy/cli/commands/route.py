"""`buddy route`: a router for a model whose weights stay as they are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.named import model_option
from buddy.hub.presets import DEFAULT_MODEL

if TYPE_CHECKING:
    from buddy.training.route.recipe import RouteRecipe
    from buddy.training.route.start import Described

Rows = list[Path] | None
_MAX_TOKENS: Final = 256
"""Tokens of prompt and answer together, where the context holds as many."""


@options.on_device
def route(
    model: Annotated[
        str,
        model_option("Preset, hub id, folder or GGUF file without a router: one is fitted to it."),
    ] = DEFAULT_MODEL,
    rows: Annotated[
        Rows,
        typer.Option(
            metavar="FILE",
            help="Rows of prompts with answers (JSON lines); repeat for several files. Each "
            "`source` that they name is a group. The mix that ships with Buddy if not given.",
        ),
    ] = None,
    check: Annotated[
        Rows,
        typer.Option(
            metavar="FILE",
            help="Rows for the table alone, of the same sources or of others; some of --rows if "
            "not given.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the checkpoint, the orders and the record.")
    ] = Path("runs/route"),
    dtype: Annotated[
        str | None,
        options.dtype(
            "bfloat16",
            "float32",
            if_not_given="If not given, bfloat16 where it is fast, else float32.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in search.rows=60."),
    ] = None,
) -> None:
    """Fit a router to a model whose weights stay as they are.

    It searches which blocks each kind of prompt can spare. Interrupted, the same command goes on
    where it stopped.

    Example: `buddy route qwen3-0.6b --out runs/routed`
    """
    from buddy.cli.views.display import stderr
    from buddy.cli.views.route_table import show_route
    from buddy.cli.views.run_bar import RunBar
    from buddy.errors import RecipeError
    from buddy.records import read_record
    from buddy.training.route.run import train_route
    from buddy.training.route.start import Described
    from buddy.training.state import RECORD

    if check and not rows:
        raise RecipeError("--check needs --rows: the mix that ships has rows for the check itself")
    described = Described.of(model)
    recipe = _recipe(described, rows, check, dtype, changes or [])
    console = stderr()
    try:
        with RunBar() as bar:
            checkpoint = train_route(
                recipe, out, resume=True, listener=bar.listener(), described=described
            )
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", style="dim")
        raise typer.Exit(130) from None
    show_route(console, read_record(out / RECORD))
    typer.echo(f"{checkpoint}")


def _recipe(
    described: "Described", rows: Rows, check: Rows, dtype: str | None, changes: list[str]
) -> "RouteRecipe":
    from buddy.data.mix import MIX
    from buddy.errors import RecipeError
    from buddy.settings import build, change_value
    from buddy.training.route.recipe import RouteRecipe

    has_template = described.tokenizer.chat_template is not None
    how = {"template": "chat" if has_template else "alpaca"}
    files = [{"path": str(file), **how} for file in rows or []]
    values: dict[str, Any] = {
        "model": {"name": described.resolved.name, "dtype": dtype or _fast_dtype()},
        "data": {
            "train": files or [{"path": MIX, **how}],
            "validation": [{"path": str(file), **how} for file in check or []],
            "max_tokens": min(_MAX_TOKENS, described.outline.backbone.context),
        },
    }
    for change in changes:
        key = change.partition("=")[0].strip()
        if key.partition(".")[0] == "model" or key in ("data", "data.train", "data.validation"):
            raise RecipeError(f"--set {key}: the command has an argument or an option for it")
        change_value(values, change)
    return build(RouteRecipe, values, "--set")


def _fast_dtype() -> str:
    """The number format in which whole texts are fast here."""
    from buddy.engine.executors.native.instructions import multiplies_bfloat16
    from buddy.hub.device import pick_device

    return "bfloat16" if pick_device(None).type == "cuda" or multiplies_bfloat16() else "float32"


COMMAND = Command(name="route", group="train", place=1, run=route)
