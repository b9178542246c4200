"""buddy train: stage 1, adapters and router together, by a recipe."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[Path, typer.Argument(help="TOML file; see recipes/.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoint, logs and training state.")
    ] = Path("runs/train"),
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optim.steps=250."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the training state in --out.")
    ] = False,
) -> None:
    """Train LoRA adapters and the router for every budget at once (stage 1)."""
    from buddy.cli.views.training_bar import TrainingBar
    from buddy.training.joint.recipe import Recipe
    from buddy.training.joint.run import train as run
    from buddy.training.settings import read_recipe

    settings = read_recipe(Recipe, recipe, changes or [])
    with TrainingBar() as bar:
        checkpoint = run(
            settings,
            out,
            resume=resume,
            listener=bar.listener(),
            command=shlex.join(["buddy", *sys.argv[1:]]),
        )
    if bar.has_begun:  # on the main process alone
        typer.echo(f"{checkpoint}")
