"""Who runs decode steps: the kernel on a CPU, CUDA graphs on a GPU, else the general path."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from torch import nn

from buddy.backbone.backbone import Backbone
from buddy.engine.executors.protocol import GENERAL
from buddy.errors import ModelError
from buddy.routing.tensor_version import mark_of

if TYPE_CHECKING:
    from buddy.engine.executors.native.library import NativeLibrary
    from buddy.engine.executors.protocol import Executor

EngineName = Literal["auto", "native", "general"]
_SHOWN: Final = {"native": "native engine", "graphs": "CUDA graphs", GENERAL: "general engine"}
_LOG: Final = logging.getLogger(__name__)
_warned_of: Final[set[str]] = set()


def describe_engine(engine: str, more: str | None) -> str:
    """The engine in a few words for a person.

    Args:
        engine: As records call it.
        more: Why the fast path is not taken, or the instruction set of the fast path.
    """
    shown = _SHOWN.get(engine, engine)
    return shown if more is None else f"{shown} ({more})"


def check_engine(engine: str) -> EngineName:
    """Refuse what is no engine.

    Raises:
        ModelError: It is none of the three.
    """
    if engine not in get_args(EngineName):
        raise ModelError(f"engine must be one of {', '.join(get_args(EngineName))}, got {engine!r}")
    return cast(EngineName, engine)


def _state_of(parts: Iterable[nn.Module], modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """What changes when a weight moves or changes, or a module is another one."""
    marks = [id(part) for part in parts]
    for module in modules:
        marks += map(id, module._modules.values())
        for tensors in (module._parameters, module._buffers):
            marks += mark_of(tensor for tensor in tensors.values() if tensor is not None)
    return tuple(marks)


class ExecutorChoice:
    """Makes the fast path when it is first needed, and again when the weights have moved.

    Where "auto" cannot have it, a warning of this module's logger says so, once for each reason.

    Args:
        backbone: The model.
        engine: "native" insists on it; "general" does without; "auto" takes it where it can be had.

    Raises:
        ModelError: No such engine.
    """

    def __init__(self, backbone: Backbone, engine: EngineName) -> None:
        self.engine = check_engine(engine)
        self._backbone = backbone
        self._modules: list[nn.Module] = []
        self._made_for: tuple[Any, ...] = ()
        self._made: Executor | str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies begin anew: what first use makes is left out, and made again."""
        return ExecutorChoice, (self._backbone, self.engine)

    def fast_path(self) -> "Executor | None":
        """The executor of the passes that it takes; None = the general path for all.

        Raises:
            ModelError: "native" was asked for and cannot be had.
        """
        fast = self._look()
        return None if isinstance(fast, str) else fast

    @property
    def why_general(self) -> str | None:
        """Why the general path runs every pass; None where it does not."""
        fast = self._look()
        return fast if isinstance(fast, str) else None

    @property
    def name(self) -> str:
        """What records call it: native, graphs or general."""
        fast = self.fast_path()
        return GENERAL if fast is None else fast.name

    @property
    def library(self) -> "NativeLibrary | None":
        """The compiled kernel, where it is what runs."""
        return getattr(self.fast_path(), "library", None)

    @property
    def instructions(self) -> str | None:
        """The instruction set that the kernel was compiled for; None where it does not run."""
        return None if self.library is None else self.library.instructions

    def describe(self) -> str:
        """What it runs on in a few words, or why it is the general engine."""
        return describe_engine(self.name, self.why_general or self.instructions)

    def refresh(self) -> None:
        """Look whether weights have moved or changed; asked when a session begins."""
        if self.engine == "general":
            return
        backbone = self._backbone
        parts = (backbone.embedding, backbone.blocks, backbone.final_norm, backbone.head)
        # While no module has another child, those of the last walk are all that there are.
        if not self._modules or _state_of(parts, self._modules) != self._made_for:
            self._modules = [module for part in parts for module in part.modules()]
            self._made, self._made_for = self._make(), _state_of(parts, self._modules)

    def _look(self) -> "Executor | str":
        if self.engine == "general":
            return "it was asked for"
        if not self._made_for:
            self.refresh()
        return self._made

    def _make(self) -> "Executor | str":
        """The fast path, or why it cannot be had."""
        from buddy.engine.executors.graphs import GraphDecoder
        from buddy.engine.executors.native.decoder import NativeDecoder

        try:
            if self._backbone.device.type == "cuda":
                return GraphDecoder(self._backbone)
            return NativeDecoder(self._backbone)
        except ModelError as error:
            reason = str(error)
            if self.engine == "native":
                raise ModelError(
                    f'engine "native" cannot be had: {reason}; "general" runs any model'
                ) from error
        if reason not in _warned_of:
            _warned_of.add(reason)
            _LOG.warning(
                "decode steps run on the general engine, which takes several times as long: %s; "
                'engine "general" runs it without this warning',
                reason,
            )
        return reason
