"""`buddy train`: what a recipe is of, adapters and router first of all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.processes import launched


@contextmanager
def resumable(out: Path, flag: str = " with --resume") -> Iterator[None]:
    """Ctrl-C within ends the command and says how to go on.

    Args:
        out: The run's folder.
        flag: What the same command needs to go on.
    """
    from buddy.cli.views.display import stderr

    try:
        yield
    except KeyboardInterrupt:
        how = "begins again: no state was saved"
        if (out / "state.safetensors").exists():
            how = "goes on from the last state saved"
        elif any(out.glob("measuring-*.safetensors")):
            how = "goes on from what was measured"
        stderr().print(f"interrupted: the same command{flag} {how} in {out}")
        raise typer.Exit(130) from None


@options.on_device
def train(
    recipe: options.Recipe,
    out: options.RunFolder = Path("runs/train"),
    changes: options.Changes = None,
    resume: options.Resume = False,
    plan_memory: Annotated[
        bool,
        typer.Option("--plan-memory", help="Print what a step needs of a GPU's memory; no run."),
    ] = False,
) -> None:
    """Train LoRA and router (stage 1), or what the recipe names.

    Example: `buddy train recipes/smollm2-135m.toml --set optim.steps=250`
    """
    if plan_memory:
        show_plan(recipe, changes)
        return
    with resumable(out):
        run_recipe(recipe, out, changes, resume)


def run_recipe(
    recipe: Path,
    out: Path,
    changes: list[str] | None,
    resume: bool = False,
    *,
    stage: str | None = None,
) -> None:
    """Run a recipe under a bar, and print the checkpoint's folder.

    Args:
        recipe: TOML.
        out: Folder of the run.
        changes: Of settings, as `--set` takes them.
        resume: Go on from the state in `out`.
        stage: That the recipe must be of; by the recipe if not given.
    """
    from buddy.cli.views.run_bar import RunBar
    from buddy.training.methods import read_method

    method, settings = read_method(recipe, changes or [], stage)
    with RunBar() as bar:
        checkpoint = method.load("train")(settings, out, resume=resume, listener=bar.listener())
    if bar.has_begun:  # on the main process alone
        typer.echo(f"{checkpoint}")


def show_plan(path: Path, changes: list[str] | None) -> None:
    """Print the memory of a recipe's step, from the configuration of its model alone."""
    from buddy.cli.views.display import stdout
    from buddy.cli.views.memory_table import show_memory
    from buddy.errors import RecipeError
    from buddy.training.methods import DEFAULT_METHOD, read_method
    from buddy.training.router.launch import is_to_be_sharded
    from buddy.training.router.memory import highest_budget, plan_memory
    from buddy.training.router.recipe import Recipe
    from buddy.training.router.trainer import JointTrainer

    method, recipe = read_method(path, changes or [])
    if type(recipe) is not Recipe:
        raise RecipeError(
            f"--plan-memory knows the steps of method {DEFAULT_METHOD} alone, and {path} is of "
            f"{method.name}: leave it out"
        )
    processes = launched().size
    is_to_be_sharded(recipe, JointTrainer, processes)
    plan = plan_memory(recipe, processes)
    most = highest_budget(recipe, plan.num_blocks)
    depths = [most, *(round(share * most) for share in (0.75, 0.5))]
    show_memory(stdout(), recipe, plan, depths)


COMMAND = Command(name="train", group="train", place=2, run=train, shares=True)
