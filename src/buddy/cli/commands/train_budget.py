"""`buddy train-budget`: `buddy train` for recipes of the Budget Predictor, stage 2."""

from pathlib import Path

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.commands.train import resumable, run_recipe


@options.on_device
def train_budget(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train-budget"),
    changes: options.Changes = None,
    resume: options.Resume = False,
) -> None:
    """Train the predictor of each prompt's budget (stage 2).

    Example: `buddy train-budget recipes/smollm2-135m-budget.toml --resume`
    """
    with resumable(out):
        run_recipe(recipe, out, changes, resume, stage="predictor")


COMMAND = Command(name="train-budget", group="train", place=3, run=train_budget)
