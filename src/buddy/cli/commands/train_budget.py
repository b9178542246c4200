"""`buddy train-budget`: stage 2, the Budget Predictor of a trained checkpoint, by a recipe."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def train_budget(
    recipe: Annotated[Path, typer.Argument(help="TOML file; see recipes/.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoint, logs, tables and training state.")
    ] = Path("runs/train-budget"),
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optim.steps=250."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the training state in --out.")
    ] = False,
) -> None:
    """Train the Budget Predictor, which chooses the budget of each prompt (stage 2)."""
    from buddy.cli.views.budget_bar import BudgetBar
    from buddy.training.predictor.recipe import BudgetRecipe
    from buddy.training.predictor.run import train_budget as run
    from buddy.training.settings import read_recipe

    settings = read_recipe(BudgetRecipe, recipe, changes or [])
    with BudgetBar() as bar:
        checkpoint = run(
            settings,
            out,
            resume=resume,
            listener=bar.listener(),
            command=shlex.join(["buddy", *sys.argv[1:]]),
        )
    sys.stdout.write(f"{checkpoint}\n")
