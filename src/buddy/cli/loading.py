"""Loads a model once its config alone has shown that it can do what is asked."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from buddy.cli.options import ExecutionOptions
from buddy.errors import ResultError

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.model import BuddyForCausalLM

DTYPES: Final = ("bfloat16", "float32")
"""What `--dtype` takes."""
_AS_SAVED: Final = ExecutionOptions()


def load_checked(
    name: str,
    check: "Callable[[BuddyForCausalLM], object]",
    console: "Console",
    execution: ExecutionOptions = _AS_SAVED,
    *,
    dtype: str | None = None,
    **options: Any,
) -> "BuddyForCausalLM":
    """Load a model; before its weights are fetched, let `check` look at what its config tells.

    Args:
        name: Preset, hub id, folder, GGUF file or Buddy checkpoint.
        check: Given the model without weights, refuses what it could not do.
        console: Where progress is shown.
        execution: Policy, engine and number format, in place of the model's own.
        dtype: One of `DTYPES`; as saved if None.
        **options: Others of `BuddyForCausalLM.from_pretrained`.

    Raises:
        BuddyError: What `check` raises, or what keeps the model from being loaded.
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.views.display import fetch_progress
    from buddy.hub.loading import named_dtype
    from buddy.model import BuddyForCausalLM

    with fetch_progress(console) as on_progress:
        routing: dict[str, Any] = {
            "policy": execution.policy,
            "kv_policy": execution.kv_policy,
            "engine": execution.engine,
            "on_progress": on_progress,
        }
        resolved = resolve(name)
        check(BuddyForCausalLM.outline(resolved, **routing))
        return BuddyForCausalLM.from_pretrained(
            resolved,
            dtype=named_dtype(dtype),
            merge_adapter=True,
            quant=cast(Any, execution.quant),
            **routing,
            **options,
        )


def say_if_slow(model: "BuddyForCausalLM", console: "Console") -> None:
    """Say where a command that runs whole texts would take far less time in float32."""
    from buddy.engine.dtype_warning import notes_on_dtype

    for note in notes_on_dtype(model.backbone):
        console.print(note, style="dim")


def check_room(model: "BuddyForCausalLM", tokens: int) -> None:
    """Refuse texts that the model's context does not hold.

    Raises:
        ResultError: They are longer.
    """
    room = model.config.max_position_embeddings
    if tokens > room:
        raise ResultError(
            f"texts of {tokens} tokens do not fit the model's context of {room}: ask for shorter "
            "ones"
        )
