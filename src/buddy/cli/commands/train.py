"""buddy train: stage 1, adapters and router together, by a recipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from buddy.cli import options


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
    """Train LoRA adapters and the router (stage 1)."""
    from buddy.cli.views.training_bar import TrainingBar
    from buddy.settings import read_recipe
    from buddy.training.joint.recipe import Recipe
    from buddy.training.joint.run import train as run

    settings = read_recipe(Recipe, recipe, changes or [])
    with resumable(out), TrainingBar() as bar:
        checkpoint = run(settings, out, resume=resume, listener=bar.listener())
    if bar.has_begun:  # on the main process alone
        typer.echo(f"{checkpoint}")
