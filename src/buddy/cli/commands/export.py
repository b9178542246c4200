"""`buddy export`: a folder that vLLM serves under a budget for each request."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.named import offer
from buddy.hub.presets import ROUTED_MODEL


def export(
    out: Annotated[Path, typer.Option(help="Folder to write; an earlier export is replaced.")],
    model: options.Model = ROUTED_MODEL,
    policy: Annotated[
        str | None,
        options.checked(
            options.check_policy_spec,
            help="routed (a plan for each prompt), static, or static:12,11,20. The model's own if "
            "not given.",
            autocompletion=offer("routed", "static"),
        ),
    ] = None,
) -> None:
    """Write a model for vLLM, which serves it by budgets.

    vLLM needs the plugin buddy-vllm, in an environment of its own. With `routed` each prompt has
    its own plan; with `static` plans are nested, so that a batch of mixed budgets costs what its
    deepest request does.

    Example: `buddy export qwen3-0.6b --out exported`
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.loading import load_checked
    from buddy.cli.views.display import fetch_progress, stderr
    from buddy.export.folder import check_exportable, check_free, export_model
    from buddy.hub.safe_paths import user_path

    folder = user_path(out)
    check_free(folder)
    console, resolved = stderr(), resolve(model)
    execution = options.ExecutionOptions(policy=policy)
    loaded = load_checked(resolved, check_exportable, console, execution, device="cpu")
    tokenizer = resolved.load_tokenizer()
    with fetch_progress(console) as on_progress:
        exported = export_model(
            loaded, folder, tokenizer=tokenizer, source=model, on_progress=on_progress
        )
    auto = "budget auto" if exported.has_predictor else "no budget auto"
    size = f"{exported.num_bytes / 1e6:,.0f} MB"
    summary = f"{exported.num_blocks} blocks · {exported.policy} · {auto} · {size}"
    console.print(summary, style="dim", markup=False)
    serve = shlex.join(["vllm", "serve", str(out), "--enforce-eager"])
    console.print(f"revision {exported.revision[:16]} · {serve}", style="dim", markup=False)
    sys.stdout.write(f"{out}\n")


COMMAND = Command(name="export", group="serve", place=2, run=export)
