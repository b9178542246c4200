"""`buddy train-ledger`: what depth is worth to each token of an answer, measured by a recipe."""

from pathlib import Path

import typer

from buddy.cli import options
from buddy.cli.command import Command


def train_ledger(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train-ledger"),
    changes: options.Changes = None,
) -> None:
    """Fit the ledger, which spends a mean over an answer."""
    from buddy.cli.views.ledger_bar import LedgerBar
    from buddy.settings import read_recipe
    from buddy.training.ledger.recipe import LedgerRecipe
    from buddy.training.ledger.run import train_ledger as run

    settings = read_recipe(LedgerRecipe, recipe, changes or [])
    with LedgerBar() as bar:
        checkpoint = run(settings, out, listener=bar.listener())
    typer.echo(f"{checkpoint}")


COMMAND = Command(name="train-ledger", group="train", place=4, run=train_ledger)
