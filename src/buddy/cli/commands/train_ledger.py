"""`buddy train-ledger`: `buddy train` for recipes of the ledger; what was measured goes on."""

from pathlib import Path

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.commands.train import resumable, run_recipe


@options.on_device
def train_ledger(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train-ledger"),
    changes: options.Changes = None,
) -> None:
    """Fit the ledger, which spends a mean over an answer.

    Example: `buddy train-ledger recipes/smollm2-135m-ledger.toml`
    """
    with resumable(out, flag=""):
        run_recipe(recipe, out, changes, stage="ledger")


COMMAND = Command(name="train-ledger", group="train", place=4, run=train_ledger)
