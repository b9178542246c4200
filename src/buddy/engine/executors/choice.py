"""Who runs decode steps: the kernel on a CPU, CUDA graphs on a GPU, else the general path."""

from typing import TYPE_CHECKING, Any, Literal, get_args

from buddy.backbone.backbone import Backbone
from buddy.errors import ModelError

if TYPE_CHECKING:
    from buddy.engine.executors.protocol import Executor

EngineName = Literal["auto", "native", "general"]


class ExecutorChoice:
    """Makes the fast path when it is first needed, and again when the weights have moved.

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
        self._made_for: tuple[Any, ...] = ()
        self._executor: Executor | None = None
        self.why_general: str | None = None
        """Why "auto" runs the general path; None where it does not, or was not asked yet."""

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: what was made at first use is left out, and made again."""
        return {**vars(self), "_made_for": (), "_executor": None, "why_general": None}

    def fast_path(self) -> "Executor | None":
        """The executor of the passes that it takes; None = the general path for all.

        Raises:
            ModelError: "native" was asked for and cannot be had.
        """
        if self.engine == "general":
            return None
        if not self._made_for:
            self.refresh()
        return self._executor

    def refresh(self) -> None:
        """Look whether weights have moved or changed; asked when a session begins."""
        if self.engine == "general":
            return
        backbone = self._backbone
        parts = (backbone.embedding, backbone.blocks, backbone.final_norm, backbone.head)
        modules = [module for part in parts for module in part.modules()]
        tensors = [t for part in parts for t in (*part.parameters(), *part.buffers())]
        made_for = (*map(id, modules), *((id(t), t.data_ptr(), t._version) for t in tensors))
        if made_for != self._made_for:
            self._executor, self._made_for = self._make(), made_for

    def describe(self) -> str:
        """As shown in a summary line."""
        if self.fast_path() is None:
            return "general"
        return "graphs" if self._backbone.device.type == "cuda" else "native"

    def _make(self) -> "Executor | None":
        from buddy.engine.executors.graphs import GraphDecoder
        from buddy.engine.executors.native.decoder import NativeDecoder

        self.why_general = None
        try:
            if self._backbone.device.type == "cuda":
                return GraphDecoder(self._backbone)
            return NativeDecoder(self._backbone)
        except ModelError as error:
            if self.engine == "native":
                raise
            self.why_general = str(error)
            return None
