"""A model's prior: how much each of its middle blocks matters, and where that is known from."""

import hashlib
from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

OnProgress = Callable[[str, int, int | None], None]
"""Called as `on_progress(stage, done, total)`."""


class Prior:
    """Importance that is known. A subclass may measure it when it is first asked for.

    Args:
        values: Normalised importance of the middle blocks, larger = keep.
        source: Where it comes from, for summary lines.
    """

    def __init__(self, values: Float[Tensor, " middle"], source: str = "prior") -> None:
        self._values: Tensor | None = values
        self._source = source

    @property
    def is_known(self) -> bool:
        """Whether `values` has nothing to measure."""
        return self._values is not None

    def values(self, on_progress: OnProgress | None = None) -> Float[Tensor, " middle"]:
        """Normalised importance of the middle blocks, measured now if it is not known.

        Args:
            on_progress: Told how far a measurement is.
        """
        assert self._values is not None
        return self._values

    def describe(self) -> str:
        """Where it comes from, for a summary line."""
        return self._source

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 of the values; None where they follow from the model's weights."""
        return None if self._values is None else _hashed(self._values)

    def facts(self) -> dict[str, Any] | None:
        """Its source and a hash of it, for records; None while it is not known."""
        if self._values is None:
            return None
        return {"source": self._source, "sha256": _hashed(self._values)}


def _hashed(values: Tensor) -> str:
    return hashlib.sha256(values.float().cpu().numpy().tobytes()).hexdigest()
