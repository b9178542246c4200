"""`buddy info`: what a model is made of, and what each budget of it costs."""

import json
import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.checkpoint.card import Card
    from buddy.checkpoint.manifest import Manifest
    from buddy.checkpoint.resolve import Resolved
    from buddy.depth.cost import ModelShape

RATIOS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)


def info(
    model: options.Model = ROUTED_MODEL,
    context: Annotated[
        int | None,
        options.count(
            1,
            help="Positions that a token attends to. 1024, or the model's context if shorter, if "
            "not given.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    card: Annotated[bool, typer.Option("--card", help="Print the model card alone.")] = False,
) -> None:
    """Show a model's sizes, and what each budget of it costs.

    Example: `buddy info qwen3-0.6b`
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.views.display import fetch_progress, stderr, stdout
    from buddy.cli.views.model_card import show_card
    from buddy.hub.loading import inspect_model

    model_card = _read_card(model, only=card)
    if card:
        show_card(model_card, model)
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
    facts = {
        "model": model,
        "family": family,
        **_size(shape),
        "order": _order(resolved, manifest),
        **_choosers(manifest),
        "context": context,
        "budgets": _costs(shape, context, _rank(manifest)),
        "quant": None if manifest is None else manifest.base.quant,
        **_stored(resolved),
        "card": {} if model_card is None else model_card.facts,
    }
    if as_json:
        sys.stdout.write(json.dumps(facts, allow_nan=False) + "\n")
        return
    console = stdout()
    _show_facts(console, facts, has_card=model_card is not None)
    _show_costs(console, facts, has_router=manifest is not None and manifest.router is not None)


def _read_card(model: str, *, only: bool) -> "Card | None":
    """The model card; one that cannot be read matters only where nothing else is asked for."""
    from buddy.checkpoint.card import read_card
    from buddy.checkpoint.resolve import named_folder
    from buddy.errors import CheckpointError

    folder = named_folder(model)
    if folder is None:
        return None
    with nullcontext() if only else suppress(CheckpointError):
        return read_card(folder)
    return None


def _size(shape: "ModelShape") -> dict[str, Any]:
    """How many blocks and parameters, and what a token leaves in the cache."""
    from buddy.depth.cost import kv_bytes_per_token

    return {
        "blocks": shape.num_blocks,
        "params_per_block": shape.block_params,
        "params_outside_blocks": shape.outside_params,
        "kv_bytes_per_token": kv_bytes_per_token(shape),
    }


def _costs(shape: "ModelShape", context: int, rank: int) -> list[dict[str, Any]]:
    """What a token costs at each share of the blocks that the model can run."""
    from buddy.budget.blocks import Budget
    from buddy.depth.cost import decision_share, plan_flops, weight_bytes
    from buddy.errors import BudgetError

    costs = []
    for ratio in RATIOS:
        try:
            blocks = Budget.from_ratio(ratio, shape.num_blocks).blocks
        except BudgetError:
            continue
        costs.append(
            {
                "budget": ratio,
                "blocks": blocks,
                "flops_per_token": plan_flops(shape, blocks, context=context),
                "weight_bytes": weight_bytes(shape, blocks),
                "router_share": decision_share(shape, blocks, rank=rank, tokens=1, context=context),
            }
        )
    return costs


def _show_facts(console: "Console", facts: dict[str, Any], *, has_card: bool) -> None:
    """A line for each fact of the model."""
    from rich.text import Text

    model, per_block = facts["model"], facts["params_per_block"]
    total = per_block * facts["blocks"] + facts["params_outside_blocks"]
    about = f"  {facts['family']}, {total / 1e6:,.1f} M parameters"
    console.print(Text(model, style="bold").append(about, style="not bold"))
    lines = {
        "blocks": facts["blocks"],
        "parameters per block": f"{per_block:,}",
        "parameters outside": f"{facts['params_outside_blocks']:,}",
        "KV bytes per token": f"{facts['kv_bytes_per_token']:,.0f}",
        "blocks chosen by": facts["order"],
        "budgets beside numbers": _beside(facts),
    }
    if facts["quant"] is not None:
        lines["weights"] = f"saved in {facts['quant']}; the table counts them in bfloat16"
    if "stored" in facts:
        counts = [f"{count} in {kind}" for kind, count in facts["stored"].items()]
        lines["file"] = ", ".join([counts[0].replace(" ", " tensors ", 1), *counts[1:]])
        kept = [f"{name} of {' and '.join(kinds)}" for name, kinds in facts["kept_by"].items()]
        lines["kept under --quant"] = ", ".join(kept) or "none: all are rounded again"
    if facts["auto"] is not None:
        lines["budget auto"] = facts["auto"]
    if has_card:
        lines["licence"] = facts["card"].get("license", "unknown")
        lines["model card"] = f"buddy info {model} --card"
    for name, value in lines.items():
        console.print(f"  {name:<22} {value}", markup=False)


def _show_costs(console: "Console", facts: dict[str, Any], *, has_router: bool) -> None:
    """A row for each budget, and how it compares with full depth."""
    from rich.table import Table

    from buddy.cli.views.tables import show_table

    table = Table(title=f"One token at context {facts['context']:,}", title_justify="left")
    adds = "router adds" if has_router else "a router would add"
    for name in ("budget", "blocks", "GFLOPs", "of dense", adds, "weights read"):
        table.add_column(name, justify="right", no_wrap=True)
    for cost in facts["budgets"]:
        dense = facts["budgets"][0]["flops_per_token"]
        table.add_row(
            f"{cost['budget']:.1%}",
            f"{cost['blocks']}",
            f"{cost['flops_per_token'] / 1e9:.3f}",
            f"{cost['flops_per_token'] / dense:.1%}",
            f"{cost['router_share']:.4%}",
            f"{cost['weight_bytes'] / 1e6:,.1f} MB",
        )
    show_table(console, table)


def _stored(model: "Resolved") -> dict[str, Any]:
    """Tensors of a GGUF file by type, and which of them a quantisation keeps; else nothing."""
    if (gguf := model.base.gguf) is None:
        return {}
    from collections import Counter

    from buddy.hub.gguf.blocks import kept_types
    from buddy.hub.gguf.header import read_header

    header = read_header(gguf)
    counts = Counter(tensor.kind for tensor in header.tensors.values())
    return {"stored": dict(counts.most_common()), "kept_by": kept_types(header)}


def _manifest(model: "Resolved") -> "Manifest | None":
    """What a checkpoint consists of, its files checked; None of a model that is none."""
    from buddy.checkpoint.listed_files import check_files

    if model.checkpoint is None:
        return None
    check_files(model.checkpoint.folder, model.checkpoint.manifest.files)
    return model.checkpoint.manifest


def _choosers(manifest: "Manifest | None") -> dict[str, Any]:
    """What of a checkpoint chooses how many blocks run: a predictor and its worth, a ledger."""
    ledger = None if manifest is None else manifest.ledger
    constant = None if manifest is None else manifest.constant
    return {
        "has_predictor": manifest is not None and manifest.predictor is not None,
        "auto": None if constant is None else constant.describe(),
        "means": None if ledger is None else [ledger.levels[0], ledger.levels[-1]],
    }


def _beside(facts: dict[str, Any]) -> str:
    """The budgets that are no plain number of blocks, in words."""
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
