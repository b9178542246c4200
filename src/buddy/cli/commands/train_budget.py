"""`buddy train-budget`: stage 2, the Budget Predictor of a trained checkpoint, by a recipe."""

import sys
from pathlib import Path

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.commands.train import resumable


def train_budget(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train-budget"),
    changes: options.Changes = None,
    resume: options.Resume = False,
) -> None:
    """Train the predictor of each prompt's budget (stage 2)."""
    from buddy.cli.views.budget_bar import BudgetBar
    from buddy.settings import read_recipe
    from buddy.training.predictor.recipe import BudgetRecipe
    from buddy.training.predictor.run import train_budget as run

    settings = read_recipe(BudgetRecipe, recipe, changes or [])
    with resumable(out), BudgetBar() as bar:
        checkpoint = run(settings, out, resume=resume, listener=bar.listener())
    sys.stdout.write(f"{checkpoint}\n")


COMMAND = Command(name="train-budget", group="train", place=3, run=train_budget)
