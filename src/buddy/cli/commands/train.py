"""buddy train: stage 1, adapters and router together, by a recipe."""

from pathlib import Path

import typer

from buddy.cli import options


def train(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train"),
    changes: options.Changes = None,
    resume: options.Resume = False,
) -> None:
    """Train LoRA adapters and the router for every budget at once (stage 1)."""
    from buddy.cli.views.training_bar import TrainingBar
    from buddy.settings import read_recipe
    from buddy.training.joint.recipe import Recipe
    from buddy.training.joint.run import train as run

    settings = read_recipe(Recipe, recipe, changes or [])
    with TrainingBar() as bar:
        checkpoint = run(settings, out, resume=resume, listener=bar.listener())
    if bar.has_begun:  # on the main process alone
        typer.echo(f"{checkpoint}")
