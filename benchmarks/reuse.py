"""What an earlier run left is used only where it is of the same recipe, or the same command."""

import json
import shlex
import sys
from dataclasses import asdict

from buddy.records import read_record


def is_trained(folder, recipe):
    """Whether a folder holds the finished run of a recipe; one of another recipe ends the process.

    A run that is not finished is for `buddy train --resume` to look at.
    """
    path = folder / "record.json"
    if not path.exists():
        return False
    found = _flat(read_record(path)["config"])
    found.pop("processes", None)
    wanted = _flat(json.loads(json.dumps(asdict(recipe))))
    absent = object()
    changed = [
        key
        for key in dict.fromkeys([*wanted, *found])
        if found.get(key, absent) != wanted.get(key, absent)
    ]
    if changed:
        sys.exit(
            f"{folder} holds the run of another recipe, with other {', '.join(changed)}: "
            "delete it to train again, or name another --runs"
        )
    return True


def is_measured(path, arguments):
    """Whether a record was written by `buddy` with these arguments; one of others ends the process.

    Model, rows, depths and limits are all in the command, and it names the record itself.
    """
    if not path.exists():
        return False
    found, wanted = read_record(path)["command"], shlex.join(["buddy", *map(str, arguments)])
    if found != wanted:
        sys.exit(
            f"{path} was measured by another command, `{found}` and not `{wanted}`: "
            "delete it to measure again, or name another --runs"
        )
    return True


def _flat(table, prefix=""):
    """A table of tables as one, with dots in its keys."""
    flat = {}
    for key, value in table.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat
