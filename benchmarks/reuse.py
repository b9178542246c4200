"""What an earlier run left is used only where it is of the same recipe, or the same command."""

import functools
import shlex
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass

from buddy import BuddyForCausalLM
from buddy.hub.loading import named_dtype
from buddy.records import read_record
from buddy.resume import differing


def is_trained(folder, recipe):
    """Whether a folder holds the finished run of a recipe; one of another recipe ends the process.

    A run that is not finished is for `buddy train --resume` to look at.
    """
    path = folder / "record.json"
    if not path.exists():
        return False
    found, wanted = read_record(path)["config"], asdict(recipe)
    for beside_it in {"processes", "measured_prior", "method", "taught_by"} - wanted.keys():
        found.pop(beside_it, None)
    add_defaults(found, recipe)
    changed = differing(found, wanted)
    if changed:
        sys.exit(
            f"{folder} holds the run of another recipe, with other {', '.join(changed)}: "
            "delete it to train again, or name another --runs"
        )
    return True


def add_defaults(found, recipe):
    """A run from before there was a setting did what its default does."""
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name not in found:
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            if default is not MISSING:
                found[field.name] = asdict(default) if is_dataclass(default) else default
        elif is_dataclass(value) and found[field.name] is not None:
            add_defaults(found[field.name], value)


def is_measured(path, arguments, checkpoint, dtype=None):
    """Whether a record was written by `buddy` with these arguments; one of others ends the process.

    Rows, depths and limits are all in the command, and it names the record itself. The model is
    compared by its weights: a folder may have been trained anew.
    """
    if not path.exists():
        return False
    record = read_record(path)
    found, wanted = record["command"], shlex.join(["buddy", *map(str, arguments)])
    if found != wanted:
        sys.exit(
            f"{path} was measured by another command, `{found}` and not `{wanted}`: "
            "delete it to measure again, or name another --runs"
        )
    changed = differing(record.get("model"), facts(checkpoint, dtype))
    if changed:
        sys.exit(
            f"{path} was measured on another model than {checkpoint} is now, with other "
            f"{', '.join(changed)}: delete it and its samples to measure again"
        )
    return True


@functools.cache
def facts(checkpoint, dtype=None):
    """What tells the model in a folder from others, loaded in a dtype."""
    loaded = BuddyForCausalLM.from_pretrained(checkpoint, dtype=named_dtype(dtype), device="cpu")
    return loaded.facts()
