"""Steps that are not taken twice: what an earlier run left is used where it is of the same kind.

A training run is of a recipe, a measurement of a command, and both are of a model. What is there of
others is refused: nothing is measured again, or mixed, unasked.
"""

import functools
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from buddy.errors import ResultError
from buddy.records import read_record
from buddy.resume import differing

_BESIDE_RECIPE: Final = (
    *("processes", "measured_prior", "method", "taught_by", "num_blocks", "prompt_blocks"),
)
"""What the record of a training run may have beside its recipe."""


def trained_record(folder: Path, recipe: Any) -> dict[str, Any] | None:
    """The record of a finished training run; None where there is none.

    A run that is not finished is for `buddy train --resume` to look at.

    Args:
        folder: That it was written to.
        recipe: A dataclass; a record from before there was a setting has the setting's default.

    Raises:
        ResultError: The run is of another recipe.
    """
    path = folder / "record.json"
    if not path.exists():
        return None
    record = read_record(path)
    saved, wanted = dict(record["config"]), asdict(recipe)
    for name in _BESIDE_RECIPE:
        if name not in wanted:
            saved.pop(name, None)
    _add_defaults(saved, recipe)
    refuse_others(folder, "another recipe, with other", differing(saved, wanted))
    return record


def _add_defaults(saved: dict[str, Any], recipe: Any) -> None:
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name not in saved:
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            if default is not MISSING:
                saved[field.name] = asdict(default) if is_dataclass(default) else default  # type: ignore[arg-type]
        elif is_dataclass(value) and isinstance(saved[field.name], dict):
            saved[field.name] = dict(saved[field.name])
            _add_defaults(saved[field.name], value)


def measured_record(path: Path, arguments: Sequence[object]) -> dict[str, Any] | None:
    """The record that `buddy` wrote with these arguments; None where there is none.

    Rows, depths and limits are all in the command, and it names the record itself.

    Raises:
        ResultError: It was written by another command.
    """
    if not path.exists():
        return None
    record, wanted = read_record(path), shown_command(arguments)
    if record.get("command") != wanted:
        other = f"`{record.get('command')}` and not `{wanted}`"
        raise ResultError(f"{path} is of another command, {other}: {_AGAIN}")
    return record


_AGAIN: Final = "delete it and its samples to make it again, or name another folder"


def refuse_others(path: Path, what: str, changed: Sequence[str]) -> None:
    """Refuse what is there where it differs from what is wanted.

    Args:
        path: Of what is there.
        what: That differs, as in `another recipe, with other`.
        changed: Differences, as `differing` gives them.

    Raises:
        ResultError: There is a difference.
    """
    if changed:
        raise ResultError(f"{path} is of {what} {', '.join(changed)}: {_AGAIN}")


def check_same_model(
    path: Path, record: dict[str, Any], facts: dict[str, Any], without: Iterable[str] = ()
) -> None:
    """Refuse a record of another model: a folder may have been trained anew.

    Args:
        path: Of the record.
        record: As `read_record` gives it.
        facts: Of the model as it is now.
        without: Facts that do not count, such as those of a part that the step itself trains.

    Raises:
        ResultError: It is of another model.
    """
    left_out = set(without)
    saved, wanted = (
        {name: fact for name, fact in dict(parts or {}).items() if name not in left_out}
        for parts in (record.get("model"), facts)
    )
    refuse_others(path, "another model, with other", differing(saved, wanted))


@functools.lru_cache(maxsize=64)
def facts_of(model: str, dtype: str | None = None) -> dict[str, Any]:
    """What tells a model from others, loaded in a dtype or as it was saved."""
    from buddy.hub.loading import named_dtype
    from buddy.model import BuddyForCausalLM

    loaded = BuddyForCausalLM.from_pretrained(model, dtype=named_dtype(dtype), device="cpu")
    return loaded.facts()


def shown_command(arguments: Sequence[object]) -> str:
    """A command of ours as it can be typed again."""
    return shlex.join(["buddy", *map(str, arguments)])


def run_buddy(arguments: Sequence[object]) -> None:
    """Run a command of ours in a process of its own; what it prints goes to stderr.

    Raises:
        ResultError: The command failed.
        KeyboardInterrupt: It was interrupted.
    """
    done = subprocess.run(
        [sys.executable, "-m", "buddy", *map(str, arguments)],
        stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
        check=False,
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise ResultError(
            f"`{shown_command(arguments)}` ended with exit code {done.returncode}: mend what it "
            "says, and the same command goes on; finished steps are kept"
        )


def _has_file(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
