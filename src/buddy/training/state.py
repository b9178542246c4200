"""The folder of a run, and the state in it from which the run goes on to the same result."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from filelock import FileLock
from torch import Tensor

from buddy.checkpoint.listed_files import MANIFEST, check_replaceable
from buddy.errors import BuddyError, CheckpointError, TrainingError
from buddy.files import alone
from buddy.resume import ResumeFile, Words

CHECKPOINT: Final = "checkpoint"
STATE: Final = "state.safetensors"
RECORD: Final = "record.json"
"""What a run leaves in its folder."""
LOCK: Final = ".lock"
"""File in a run's folder that is locked while it runs."""
_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter that has had a gradient."""
WORDS: Final = Words(
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
        try:
            check_replaceable(out / CHECKPOINT, MANIFEST, "Buddy checkpoint")
        except CheckpointError as error:
            raise TrainingError(f"--out: {error}") from error
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:
        raise _cannot_be_made(out, error.strerror or str(error)) from error
    if not there.is_dir():
        raise _cannot_be_made(out, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _cannot_be_made(out, f"{there} cannot be written to")


def _cannot_be_made(out: Path, why: str) -> TrainingError:
    return TrainingError(f"the folder {out} cannot be made: {why}; name another --out")


@contextmanager
def claimed_folder(out: Path, lock: FileLock) -> Iterator[None]:
    """Make the folder of a run, and hold it alone; the lock falls with the process.

    Args:
        out: The folder.
        lock: On a file in it.

    Raises:
        TrainingError: It cannot be made, or another run holds it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(out, error.strerror or str(error)) from error
    with alone(out, lock, TrainingError):
        yield


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
    ResumeFile(path, identity, WORDS).write(tensors, step=step, extra=extra or {})


def load_state(
    path: Path,
    *,
    identity: dict[str, Any],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    restore: Callable[[int, dict[str, Any]], None],
) -> int:
    """Put a saved state into parameters and optimiser, all of it or nothing.

    Args:
        path: As `save_state` wrote it.
        identity: Of the run.
        parameters: What is trained.
        optimizer: AdamW over these parameters, in this order.
        steps: Of the run.
        restore: Takes the steps done and the plain values that were carried along, and refuses
            those of another run.

    Returns:
        Steps done; 0 where there is no state.

    Raises:
        TrainingError: It is damaged, or belongs to another run.
    """
    file = ResumeFile(path, identity, WORDS)
    like = {f"parameter.{name}": value for name, value in parameters.items()}
    moments = {
        f"optimizer.{name}:{moment}": torch.tensor(0.0) if moment == "step" else parameter
        for name, parameter in parameters.items()
        for moment in _MOMENTS
    }
    if (state := file.read(like, moments)) is None:
        return 0
    restored: dict[int, dict[str, Tensor]] = {}
    for place, name in enumerate(parameters):
        keys = {moment: f"optimizer.{name}:{moment}" for moment in _MOMENTS}
        there = [key in state.tensors for key in keys.values()]
        if any(there) and not all(there):
            raise file.damaged(f"it lacks moments of {name}")
        if any(there):
            restored[place] = {moment: state.tensors[key] for moment, key in keys.items()}
    done = state.values.get("step")
    try:
        if type(done) is int:
            restore(done, state.values["extra"])
    except BuddyError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise file.damaged(f"what it carries cannot be taken up: {error!r}") from error
    done = file.check_done(done, steps)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state.tensors[f"parameter.{name}"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": restored})
    return done
