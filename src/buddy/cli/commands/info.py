"""`buddy info`: what a model is made of, and what each budget of it costs."""

import json
import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command

if TYPE_CHECKING:
    from buddy.checkpoint.manifest import Manifest
    from buddy.checkpoint.resolve import Resolved

RATIOS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)


def info(
    model: Annotated[str, typer.Argument(help="Preset, hub id, folder or GGUF file.")],
    context: Annotated[
        int | None,
        options.count(
            1, help="Positions that a token attends to; 1024, or the model's context if shorter."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    card: Annotated[bool, typer.Option("--card", help="Print the model card alone.")] = False,
) -> None:
    """Show a model's sizes, and what each budget of it costs."""
    from rich.table import Table
    from rich.text import Text

    from buddy.budget.blocks import Budget
    from buddy.checkpoint.card import read_card
    from buddy.checkpoint.resolve import named_folder, resolve
    from buddy.cli.views.display import fetch_progress, stderr, stdout
    from buddy.cli.views.model_card import show_card
    from buddy.cli.views.tables import show_table
    from buddy.depth.cost import (
        decision_share,
        kv_bytes_per_token,
        plan_flops,
        weight_bytes,
    )
    from buddy.errors import BudgetError, CheckpointError
    from buddy.hub.loading import inspect_model

    folder = named_folder(model)
    found = None
    if folder is not None:
        # A README that is no model card is no reason to say nothing of the model.
        with nullcontext() if card else suppress(CheckpointError):
            found = read_card(folder)
    if card:
        show_card(found, model)
        return
    resolved = resolve(model)
    with fetch_progress(stderr()) as on_progress:
        family, shape, longest = inspect_model(resolved.base, on_progress=on_progress)
    context = min(1024, longest) if context is None else context
    if context > longest:
        raise typer.BadParameter(
            f"must be at most {longest:,}, the context of {model}, got {context:,}",
            param_hint="--context",
        )
    manifest = _manifest(resolved)
    rows, rank = [], _rank(manifest)
    for ratio in RATIOS:
        try:
            blocks = Budget.from_ratio(ratio, shape.num_blocks).blocks
        except BudgetError:
            continue
        rows.append(
            {
                "budget": ratio,
                "blocks": blocks,
                "flops_per_token": plan_flops(shape, blocks, context=context),
                "weight_bytes": weight_bytes(shape, blocks),
                "router_share": decision_share(shape, blocks, rank=rank, tokens=1, context=context),
            }
        )
    facts = {
        "model": model,
        "family": family,
        "blocks": shape.num_blocks,
        "params_per_block": shape.block_params,
        "params_outside_blocks": shape.outside_params,
        "kv_bytes_per_token": kv_bytes_per_token(shape),
        "order": _order(resolved, manifest),
        **_choosers(manifest),
        "context": context,
        "budgets": rows,
        "card": {} if found is None else found.facts,
    }
    if as_json:
        sys.stdout.write(json.dumps(facts, allow_nan=False) + "\n")
        return
    console = stdout()
    total = shape.block_params * shape.num_blocks + shape.outside_params
    title = Text(model, style="bold").append(
        f"  {family}, {total / 1e6:,.1f} M parameters", style="not bold"
    )
    console.print(title)
    console.print(f"  blocks                 {shape.num_blocks}")
    console.print(f"  parameters per block   {shape.block_params:,}")
    console.print(f"  parameters outside     {shape.outside_params:,}")
    console.print(f"  KV bytes per token     {kv_bytes_per_token(shape):,.0f}")
    console.print(f"  blocks chosen by       {facts['order']}", markup=False)
    console.print(f"  budgets beside numbers {_beside(facts)}", markup=False)
    if found is not None:
        console.print(
            f"  licence of weights     {found.facts.get('license', 'unknown')}", markup=False
        )
        console.print(f"  model card             buddy info {model} --card", markup=False)
    table = Table(title=f"One token at context {context:,}", title_justify="left")
    has_router = manifest is not None and manifest.router is not None
    adds = "router adds" if has_router else "a router would add"
    for name in ("budget", "blocks", "GFLOPs", "of dense", adds, "weights read"):
        table.add_column(name, justify="right", no_wrap=True)
    dense = plan_flops(shape, shape.num_blocks, context=context)
    for row in rows:
        table.add_row(
            f"{row['budget']:.1%}",
            f"{row['blocks']}",
            f"{row['flops_per_token'] / 1e9:.3f}",
            f"{row['flops_per_token'] / dense:.1%}",
            f"{row['router_share']:.4%}",
            f"{row['weight_bytes'] / 1e6:,.1f} MB",
        )
    show_table(console, table)


def _manifest(model: "Resolved") -> "Manifest | None":
    """What a checkpoint consists of, its files checked; None of a model that is none."""
    from buddy.checkpoint.listed_files import check_files

    if model.checkpoint is None:
        return None
    check_files(model.checkpoint.folder, model.checkpoint.manifest.files)
    return model.checkpoint.manifest


def _choosers(manifest: "Manifest | None") -> dict[str, Any]:
    """What of a checkpoint chooses how many blocks run: a predictor, and the means of a ledger."""
    ledger = None if manifest is None else manifest.ledger
    return {
        "has_predictor": manifest is not None and manifest.predictor is not None,
        "means": None if ledger is None else [ledger.levels[0], ledger.levels[-1]],
    }


def _beside(facts: dict[str, Any]) -> str:
    """In words, the budgets that are no plain number of blocks."""
    known = ["auto"] if facts["has_predictor"] else []
    if facts["means"] is not None:
        low, high = (share / facts["blocks"] for share in facts["means"])
        known.append(f"mean:{low:.3g} to mean:{high:.3g}")
    return ", ".join(known) or "none: the model has no predictor and no ledger"


def _rank(manifest: "Manifest | None") -> int:
    """Width of the Decision Module: of the checkpoint's, or of one by default."""
    from buddy.routing.decision import DecisionConfig

    router = None if manifest is None else manifest.router
    return (DecisionConfig() if router is None else router.decision).rank


def _order(model: "Resolved", manifest: "Manifest | None") -> str:
    """Where a budget's blocks come from, without reading any weights."""
    from buddy.checkpoint.quick_prior import is_cached, shipped_prior

    if manifest is not None:
        return f"policy {manifest.policy} of the checkpoint"
    prior = shipped_prior(model.name)
    if prior is not None:
        return prior.describe()
    if is_cached(model):
        return "order of a quick cosine pass (cached)"
    return "order of a quick cosine pass, measured when a budget first needs it"


COMMAND = Command(name="info", group="run", place=4, run=info)
