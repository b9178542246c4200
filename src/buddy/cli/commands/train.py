"""`buddy train`: adapters and router together, or another method, by a recipe."""

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
        kept = (out / "state.safetensors").exists()
        how = "goes on from the last state saved" if kept else "begins again: no state was saved"
        stderr().print(f"interrupted: the same command with --resume {how} in {out}")
        raise typer.Exit(130) from None


def train(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train"),
    changes: options.Changes = None,
    resume: options.Resume = False,
) -> None:
    """Train LoRA and router (stage 1), or the recipe's own method."""
    from buddy.cli.views.method_bar import MethodBar
    from buddy.cli.views.training_bar import TrainingBar
    from buddy.training.methods import read_method

    method, settings = read_method(recipe, changes or [])
    with resumable(out), (TrainingBar if method.is_joint else MethodBar)() as bar:
        checkpoint = method.load("train")(settings, out, resume=resume, listener=bar.listener())
    if bar.has_begun:  # on the main process alone
        typer.echo(f"{checkpoint}")


COMMAND = Command(name="train", group="train", place=2, run=train)
