"""Who runs decode steps: the kernel on a CPU, CUDA graphs on a GPU, else the general path."""

from typing import TYPE_CHECKING, Literal, get_args

import torch

from buddy.errors import ModelError
from buddy.models.backbone import Backbone

if TYPE_CHECKING:
    from buddy.engine.decoder import Decoder

EngineName = Literal["auto", "native", "general"]


class DecoderChoice:
    """Makes the native decoder when it is first needed, and again when the weights have moved.

    Args:
        backbone: The model.
        engine: "native" insists on it; "general" does without; "auto" takes it where it can be had.

    Raises:
        ModelError: No such engine.
    """

    def __init__(self, backbone: Backbone, engine: EngineName) -> None:
        if engine not in get_args(EngineName):
            raise ModelError(
                f"engine must be one of {', '.join(get_args(EngineName))}, got {engine!r}"
            )
        self.engine = engine
        self._backbone = backbone
        self._made_for: tuple[torch.device, torch.dtype] | None = None
        self._native: Decoder | None = None
        self.why_general: str | None = None
        """Why "auto" runs the general path; None where it does not, or was not asked yet."""

    def native(self) -> "Decoder | None":
        """The native decoder, or None for the general path.

        Raises:
            ModelError: "native" was asked for and cannot be had.
        """
        if self.engine == "general":
            return None
        made_for = (self._backbone.device, self._backbone.dtype)
        if made_for != self._made_for:
            self._native, self._made_for = self._make(), made_for
        return self._native

    def describe(self) -> str:
        """As shown in a summary line."""
        if self.native() is None:
            return "general"
        return "graphs" if self._backbone.device.type == "cuda" else "native"

    def _make(self) -> "Decoder | None":
        from buddy.engine.graphs import GraphDecoder
        from buddy.engine.native.decoder import NativeDecoder

        try:
            if self._backbone.device.type == "cuda":
                return GraphDecoder(self._backbone)
            return NativeDecoder(self._backbone)
        except ModelError as error:
            if self.engine == "native":
                raise
            self.why_general = str(error)
            return None
