"""The folder of a run, and the state in it from which the run goes on to the same result."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from buddy.checkpoint.listed_files import MANIFEST
from buddy.errors import TrainingError
from buddy.resume import ResumeFile, Words

CHECKPOINT: Final = "checkpoint"
STATE: Final = "state.safetensors"
RECORD: Final = "record.json"
"""What a run leaves in its folder."""
_WORDS: Final = Words(
    file="the training state ",
    other="is the state of another run",
    otherwise="run it with the recipe it was begun with, or name another --out",
    intact="the state before is intact: make room and run the same command with --resume",
    error=TrainingError,
)


def check_folder(out: Path, resume: bool) -> None:
    """Refuse a folder that a run cannot have, before anything is done for the run.

    Raises:
        TrainingError: It holds a state that is not to be gone on from, or files in the place of
            the checkpoint; or it cannot be made or written to.
    """
    try:
        if (out / STATE).exists() and not resume:
            raise TrainingError(
                f"{out} holds a run already: go on with --resume, or name another --out"
            )
        checkpoint = out / CHECKPOINT
        is_ours = not checkpoint.exists() or (checkpoint / MANIFEST).is_file()
        if not is_ours and (not checkpoint.is_dir() or any(checkpoint.iterdir())):
            raise TrainingError(f"{checkpoint} is no Buddy checkpoint: name another --out")
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:
        raise _cannot_be_made(out, error.strerror or str(error)) from error
    if not there.is_dir():
        raise _cannot_be_made(out, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _cannot_be_made(out, f"{there} cannot be written to")


def _cannot_be_made(out: Path, why: str) -> TrainingError:
    return TrainingError(f"the folder {out} cannot be made: {why}; name another --out")


def make_folder(out: Path) -> None:
    """Make the folder of a run; only once nothing of its recipe can be refused any more.

    Raises:
        TrainingError: It cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(out, error.strerror or str(error)) from error


def save_state(
    path: Path,
    *,
    identity: dict[str, Any],
    step: int,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write the state after `step` steps.

    Args:
        path: Replaced at once or not at all.
        identity: All that the result depends on; a run of another identity refuses the state.
        step: Steps done.
        parameters: What is trained.
        optimizer: Over these parameters, in this order.
        extra: Plain values to carry along.

    Raises:
        TrainingError: It cannot be written; the state before is intact.
    """
    tensors = {f"parameter.{name}": value for name, value in parameters.items()}
    names = list(parameters)
    for place, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            tensors[f"optimizer.{names[place]}:{name}"] = torch.as_tensor(value)
    ResumeFile(path, identity, _WORDS).write(tensors, step=step, extra=extra or {})


def load_state(
    path: Path,
    *,
    identity: dict[str, Any],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> tuple[int, dict[str, Any]] | None:
    """Put a saved state into parameters and optimiser.

    Returns:
        Steps done, and the plain values that were carried along; None where there is no state.

    Raises:
        TrainingError: It is damaged, or belongs to another run.
    """
    needed = [f"parameter.{name}" for name in parameters]
    state = ResumeFile(path, identity, _WORDS).read_all(*needed)
    if state is None:
        return None
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state.tensors[f"parameter.{name}"])
    moments: dict[int, dict[str, Tensor]] = {}
    for place, name in enumerate(parameters):
        prefix = f"optimizer.{name}:"
        of_parameter = {
            key.removeprefix(prefix): value
            for key, value in state.tensors.items()
            if key.startswith(prefix)
        }
        if of_parameter:
            moments[place] = of_parameter
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return int(state.values["step"]), dict(state.values["extra"])
