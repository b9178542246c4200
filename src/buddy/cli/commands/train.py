"""`buddy train`: what a recipe is of, adapters and router first of all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from buddy.cli import options
from buddy.cli.command import Command


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Ctrl-C within ends the command and says how to go on."""
    from buddy.cli.views.display import stderr

    try:
        yield
    except KeyboardInterrupt:
        how = "begins again: no state was saved"
        if (out / "state.safetensors").exists():
            how = "goes on from the last state saved"
        stderr().print(f"interrupted: the same command with --resume {how} in {out}")
        raise typer.Exit(130) from None


@options.on_device
def train(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train"),
    changes: options.Changes = None,
    resume: options.Resume = False,
) -> None:
    """Train LoRA and router (stage 1), or what the recipe names.

    Example: `buddy train recipes/smollm2-135m.toml --set optim.steps=250`
    """
    with resumable(out):
        run_recipe(recipe, out, changes, resume)


def run_recipe(
    recipe: Path,
    out: Path,
    changes: list[str] | None,
    resume: bool = False,
    *,
    stage: str | None = None,
) -> None:
    """Run a recipe under a bar, and print the checkpoint's folder.

    Args:
        recipe: TOML.
        out: Folder of the run.
        changes: Of settings, as `--set` takes them.
        resume: Go on from the state in `out`.
        stage: That the recipe must be of; by the recipe if not given.
    """
    from buddy.cli.views.run_bar import RunBar
    from buddy.training.methods import read_method

    method, settings = read_method(recipe, changes or [], stage)
    with RunBar() as bar:
        checkpoint = method.load("train")(settings, out, resume=resume, listener=bar.listener())
    if bar.has_begun:  # on the main process alone
        typer.echo(f"{checkpoint}")


COMMAND = Command(name="train", group="train", place=2, run=train)
