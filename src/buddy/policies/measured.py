"""What was measured of a model's blocks, read from a record; that of another model is refused."""

from pathlib import Path
from typing import Any

from buddy.depth.policy import PolicyResources
from buddy.errors import PolicyError, shown
from buddy.records import check_model, read_record
from buddy.settings import Range

_IMPORTANCE = Range(-1e30, 1e30)
"""Float32 holds it, and sums of it."""


def read_order(path: Path, resources: PolicyResources) -> tuple[list[int], str]:
    """The removal order of a record of `buddy importance` or `buddy search`.

    Args:
        path: Of the record.
        resources: Of the model that it is to serve.

    Returns:
        0-based blocks, least important first; and a few words on where they come from.

    Raises:
        ResultError: The file cannot be read, or is no record.
        PolicyError: There is no order, or it is another model's.
    """
    record = _read(path, resources)
    return _order(record, path, resources, "importance"), f"{record['kind']} {path.name}"


def read_sets(
    path: Path, resources: PolicyResources
) -> tuple[dict[int, list[int]], list[int], str]:
    """The blocks that run at each depth, from a record of `buddy search`.

    Returns:
        The sets; the removal order that they were searched from; where they come from.

    Raises:
        As `read_order`.
    """
    record = _read(path, resources)
    searched = record["results"].get("sets")
    depths = {str(depth): depth for depth in range(1, resources.num_blocks + 1)}
    if not isinstance(searched, dict) or not searched or not searched.keys() <= depths.keys():
        raise PolicyError(
            f"{path} has no sets and removal_order of a model of {resources.num_blocks} blocks: "
            "write it with buddy search"
        )
    order = _order(record, path, resources, "search")
    sets = {
        depths[name]: _blocks(blocks, f"{path}: the set of {name} blocks", resources)
        for name, blocks in searched.items()
    }
    return sets, order, f"{record['kind']} {path.name}"


def read_importance(path: Path, resources: PolicyResources) -> list[float]:
    """One number a block, larger = more important, from a record of `buddy importance`.

    A search (SLEB) measures no importance: the places in its removal order take its stead.

    Raises:
        As `read_order`.
    """
    record, num_blocks = _read(path, resources), resources.num_blocks
    measured = record["results"].get("importance")
    if measured is None:
        order = _order(record, path, resources, "importance")
        importance = [float(num_blocks)] * num_blocks
        for place, block in enumerate(order):
            importance[block] = float(place)
        return importance
    wrong = [
        value for value in measured if type(value) not in (int, float) or value not in _IMPORTANCE
    ]
    if wrong:
        raise PolicyError(
            f"{path}: importance must be numbers {_IMPORTANCE}, got {shown(wrong[0])}: measure "
            "it again"
        )
    return [float(value) for value in measured]


def _read(path: Path, resources: PolicyResources) -> dict[str, Any]:
    record = read_record(path)
    num_blocks = resources.num_blocks
    check_model(
        record,
        str(path),
        num_blocks=num_blocks,
        fingerprint=resources.fingerprint,
        error=PolicyError,
    )
    importance = record["results"].get("importance")
    if importance is not None and (
        not isinstance(importance, list) or len(importance) != num_blocks
    ):
        raise PolicyError(
            f"{path} has no importance of {num_blocks} blocks: expected a record of buddy "
            "importance for this model"
        )
    return record


def _order(
    record: dict[str, Any], path: Path, resources: PolicyResources, command: str
) -> list[int]:
    order = record["results"].get("removal_order")
    if order is None:
        what = "removal_order" if command == "importance" else "sets and removal_order"
        raise PolicyError(f"{path} has no {what}: write it with buddy {command}")
    blocks = _blocks(order, f"{path}: the removal order", resources)
    if record.get("model") is None:
        _check_depth(blocks, path, resources.num_blocks)
    return blocks


def _blocks(value: Any, what: str, resources: PolicyResources) -> list[int]:
    last = resources.num_blocks - 1
    if (
        not isinstance(value, list)
        or not all(type(block) is int and 0 <= block <= last for block in value)
        or len(set(value)) != len(value)
    ):
        raise PolicyError(
            f"{what} must name blocks of this model, each once, from 0 to {last}, got "
            f"{shown(value)}: measure it on this model"
        )
    return value


def _check_depth(order: list[int], path: Path, num_blocks: int) -> None:
    """Refuse the whole order of another model in a record that does not name its model.

    A whole order names every block, or every one but the first and the last.
    """
    named = sorted(order)
    for first, more in ((0, 0), (1, 2)):
        made_for = len(named) + more
        if named and named == list(range(first, len(named) + first)) and made_for != num_blocks:
            raise PolicyError(
                f"{path} orders blocks {named[0]} to {named[-1]}, so it was measured on a model of "
                f"{made_for} blocks and this one has {num_blocks}: measure it on this model"
            )
