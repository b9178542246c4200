"""Measures an indicator over windows, and goes on where an interrupted measurement stopped."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from jaxtyping import Float, Int
from torch import Tensor

from buddy.errors import ResultError
from buddy.importance.indicator import Indicator

SAVE_EVERY_S: Final = 20.0
OnBatch = Callable[[int, int], None]
"""Called as `on_batch(windows done, windows in all)`."""


def measure(
    indicator: Indicator,
    windows: Int[Tensor, "windows tokens"],
    *,
    batch: int = 4,
    resume: Path | None = None,
    identity: dict[str, Any] | None = None,
    on_batch: OnBatch = lambda done, total: None,
) -> Float[Tensor, " blocks"]:
    """Feed all windows and return the scores.

    Args:
        indicator: Fresh.
        windows: Without pads.
        batch: Windows at a time.
        resume: File that keeps what was gathered until the end; deleted when done.
        identity: What the measurement depends on (model, indicator ...); a file of another one
            is refused.
        on_batch: Told of progress.

    Raises:
        ResultError: The resume file is damaged, belongs to another measurement, or cannot be
            written.
    """
    mark = _mark(windows, batch, identity or {})
    done = 0 if resume is None else _restore(indicator, resume, mark)
    saved_s = time.monotonic()
    on_batch(done, len(windows))
    while done < len(windows):
        indicator.update(windows[done : done + batch])
        done = min(done + batch, len(windows))
        on_batch(done, len(windows))
        if resume is not None and time.monotonic() - saved_s > SAVE_EVERY_S:
            _save(indicator, resume, mark, done)
            saved_s = time.monotonic()
    if resume is not None:
        resume.unlink(missing_ok=True)
    return indicator.scores()


def _mark(windows: Tensor, batch: int, identity: dict[str, Any]) -> str:
    digest = hashlib.sha256(windows.cpu().numpy().tobytes())
    digest.update(json.dumps([batch, identity], sort_keys=True).encode())
    return digest.hexdigest()


def _save(indicator: Indicator, path: Path, mark: str, done: int) -> None:
    from safetensors.torch import save_file

    handle, staging = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        tensors = {name: tensor.contiguous() for name, tensor in indicator.state().items()}
        save_file(tensors, staging, metadata={"mark": mark, "done": str(done)})
        os.replace(staging, path)
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error}") from error
    finally:
        Path(staging).unlink(missing_ok=True)


def _restore(indicator: Indicator, path: Path, mark: str) -> int:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ResultError(f"{path} is damaged ({error}): delete it to start again") from error
    if metadata.get("mark") != mark:
        raise ResultError(
            f"{path} belongs to another measurement (other text, model or settings): "
            "delete it to start again, or name another file"
        )
    indicator.restore(tensors)
    return int(metadata["done"])
