"""Reads what `buddy export` wrote: the manifest, and the tensors that fix plans."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from buddy_vllm.errors import ExportError

MANIFEST: Final = "buddy-export.json"
ROUTING: Final = "buddy/routing.safetensors"
FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """An exported model's routing.

    Attributes:
        num_blocks: Blocks of the model.
        revision: Stands for every file of the export.
        policy: `routed` or `static`.
        pinned: Blocks that run whatever the budget.
        order: Of `static`, the blocks that may go, least important first.
        router: Of `routed`, `{"decay": share of its weight a token keeps with each newer one}`.
        predictor: The same of the Budget Predictor, and its `least_blocks`; None = no `auto`.
        tensors: float32, by names such as `router.table`.
    """

    num_blocks: int
    revision: str
    policy: str
    pinned: tuple[int, ...]
    order: tuple[int, ...] | None
    router: Mapping[str, Any] | None
    predictor: Mapping[str, Any] | None
    tensors: Mapping[str, NDArray[np.float32]]


def read_export(folder: Path) -> Export:
    """Read an export's manifest, and its routing once that is checked by size and SHA-256.

    Raises:
        ExportError: There is none, or it is damaged, has changed or is of another format.
    """
    path = folder / MANIFEST
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(
            f"{path} cannot be read ({error.strerror}): serve a local folder that `buddy export` "
            "wrote"
        ) from error
    except ValueError as error:
        raise ExportError(f"{path} is no JSON ({error}): export the model again") from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        found = said.get("format") if isinstance(said, dict) else said
        raise ExportError(
            f"{path} has format {str(found)[:80]}, this plugin reads {FORMAT}: export the model "
            "with the version of Buddy that goes with this plugin"
        )
    try:
        tensors = _routing(folder, said["files"][ROUTING])
        order = said["order"]
        made = Export(
            num_blocks=int(said["model"]["num_blocks"]),
            revision=str(said["revision"]),
            policy=str(said["policy"]),
            pinned=tuple(map(int, said["pinned"])),
            order=None if order is None else tuple(map(int, order)),
            router=said["router"],
            predictor=said["predictor"],
            tensors=tensors,
        )
        _check(made)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ExportError(f"{path} is damaged ({error!r}): export the model again") from error
    return made


def _routing(folder: Path, listed: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = folder / ROUTING
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ExportError(f"{path} cannot be read: export the model again") from error
    whole = len(content) == listed["bytes"]
    if not whole or hashlib.sha256(content).hexdigest() != listed["sha256"]:
        raise ExportError(f"{path} has changed since the export: export the model again")
    try:
        return load(content)
    except SafetensorError as error:
        raise ExportError(f"{path} is damaged ({error}): export the model again") from error


def _check(made: Export) -> None:
    """Refuse what would only show when a request is planned.

    Raises:
        ExportError: A block does not exist or is named twice, or a tensor has another shape.
    """
    blocks = set(range(made.num_blocks))
    order = made.order if made.policy == "static" else ()
    if made.policy not in ("routed", "static") or order is None:
        raise ExportError(f"policy {made.policy[:80]!r} of the export is not known here")
    if not {*made.pinned, *order} <= blocks or len(set(order)) != len(order):
        raise ExportError("the export names blocks twice, or such as the model does not have")
    if made.policy == "static" and {*made.pinned, *order} != blocks:
        raise ExportError("the export's order leaves blocks out that are not pinned")
    if made.policy == "routed" and made.router is None:
        raise ExportError("the export has policy routed, and no router")
    for part, settings in (("router", made.router), ("predictor", made.predictor)):
        if settings is None:
            continue
        table, offset = made.tensors[f"{part}.table"], made.tensors[f"{part}.offset"]
        up = made.tensors.get(f"{part}.up")
        width = table.shape[1]
        wanted: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
            (offset.shape, (made.num_blocks - 2,))
        ]
        if up is not None:
            wanted += [(up.shape, (made.num_blocks - 2, width))]
            wanted += [(made.tensors[f"{part}.bias"].shape, (width,))]
        elif width != made.num_blocks - 2:
            wanted += [((width,), (made.num_blocks - 2,))]
        if f"{part}.last" in made.tensors:
            wanted += [(made.tensors[f"{part}.last"].shape, table.shape)]
        if any(found != expected for found, expected in wanted):
            raise ExportError(f"the export's {part} has tensors of shapes that do not fit")
        if not all(np.isfinite(values).all() for values in (table, offset)):
            raise ExportError(f"the export's {part} holds what is no finite number")
