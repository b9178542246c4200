"""The table of commands, and what happens to their errors."""

import logging
import os
import sys

import typer

from buddy.cli.commands.bench import bench
from buddy.cli.commands.chat import chat
from buddy.cli.commands.data import data
from buddy.cli.commands.evaluate import evaluate
from buddy.cli.commands.generate import generate
from buddy.cli.commands.importance import importance
from buddy.cli.commands.info import info
from buddy.cli.commands.models import models
from buddy.cli.commands.observe import observe
from buddy.cli.commands.plot import plot
from buddy.cli.commands.search import search
from buddy.cli.commands.train import train
from buddy.cli.commands.train_budget import train_budget
from buddy.errors import BuddyError

app = typer.Typer(
    help="Run a language model under a compute budget: pay for as many blocks as you ask for.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(generate)
app.command()(chat)
app.add_typer(models, name="models")
app.command()(info)
app.command()(data)
app.command()(importance)
app.command()(search)
app.command()(train)
app.command()(train_budget)
app.add_typer(observe, name="observe")
app.command()(bench)
app.add_typer(evaluate, name="eval")
app.command()(plot)


class _ToStderr(logging.Handler):
    """Writes to stderr as it is now: a progress bar moves out of the way."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{record.getMessage()}\n")


def main() -> None:
    """Entry point: an error of ours is one line on stderr and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    log = logging.getLogger("buddy")
    log.addHandler(_ToStderr())
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        app()
    except BuddyError as error:
        sys.stderr.write(f"buddy: {' '.join(str(error).split())}\n")
        sys.exit(2)
