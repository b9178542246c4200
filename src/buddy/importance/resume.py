"""A resume file: what a measurement gathered so far, for that measurement alone."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from jaxtyping import Int
from torch import Tensor

from buddy.errors import ResultError
from buddy.files import parse_json, system_errors
from buddy.identity import differing

SAVE_EVERY_S: Final = 20.0


class ResumeFile:
    """Tensors by name, written whole or not at all.

    Args:
        path: None to keep nothing.
        windows: The text that is measured.
        identity: What else the measurement depends on (model, indicator ...), by name; plain JSON.
    """

    def __init__(
        self, path: Path | None, windows: Int[Tensor, "windows tokens"], identity: dict[str, Any]
    ) -> None:
        digest = hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()
        self._path, self._identity = path, {**identity, "text": [list(windows.shape), digest]}
        self._written_s = time.monotonic()

    def read(self, *names: str) -> dict[str, Tensor] | None:
        """What was written last; None if nothing was.

        Args:
            names: Tensors that must be there.

        Raises:
            ResultError: The file is damaged or belongs to another measurement.
        """
        from safetensors import SafetensorError, safe_open

        path = self._path
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ResultError(f"{path} is damaged ({error}): delete it to start again") from error
        saved = parse_json(metadata.get("identity", "{}"), f"the identity in {path}", ResultError)
        differs = differing(saved, self._identity)
        if differs:
            raise ResultError(
                f"{path} belongs to another measurement, with other {', '.join(differs)}: delete "
                "it to start again, or name another --out"
            )
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ResultError(
                f"{path} is damaged (it lacks {', '.join(missing)}): delete it to start again"
            )
        return tensors

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Replace what was there.

        Raises:
            ResultError: It cannot be written; what was there is intact.
        """
        from safetensors.torch import save_file

        path = self._path
        if path is None:
            return
        staging = None
        try:
            handle, staging = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            os.close(handle)
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            with system_errors():
                save_file(whole, staging, metadata={"identity": json.dumps(self._identity)})
            os.replace(staging, path)
        except OSError as error:
            raise ResultError(f"{path} cannot be written: {error.strerror or error}") from error
        finally:
            if staging is not None:
                Path(staging).unlink(missing_ok=True)
        self._written_s = time.monotonic()

    def write_if_due(self, tensors: Callable[[], dict[str, Tensor]]) -> None:
        """Write, if the last time is long enough ago."""
        if self._path is not None and time.monotonic() - self._written_s > SAVE_EVERY_S:
            self.write(tensors())

    def remove(self) -> None:
        """The measurement is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
