"""Loads a model once its config alone has shown that it can do what is asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from buddy.cli.options import FULL, ExecutionOptions
from buddy.errors import ResultError

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.checkpoint.resolve import ModelName
    from buddy.inference import InferenceModel
    from buddy.model import BuddyForCausalLM

_AS_SAVED: Final = ExecutionOptions()


def load_checked(
    name: "ModelName",
    check: "Callable[[BuddyForCausalLM], object]",
    console: "Console",
    execution: ExecutionOptions = _AS_SAVED,
    **options: Any,
) -> "BuddyForCausalLM":
    """Load a model; before its weights are fetched, let `check` look at what its config tells.

    Args:
        name: As `checkpoint.resolve.resolve` takes it.
        check: Given the model without weights, refuses what it could not do.
        console: Where progress is shown.
        execution: Policy, engine and number format, in place of the model's own.
        **options: Others of `BuddyForCausalLM.from_pretrained`.

    Raises:
        BuddyError: What `check` raises, or what keeps the model from being loaded.
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.views.display import fetch_progress
    from buddy.hub.loading import named_dtype
    from buddy.model import BuddyForCausalLM

    with fetch_progress(console) as on_progress:
        routing = _routing(execution, on_progress)
        resolved = resolve(name)
        check(BuddyForCausalLM.outline(resolved, **routing))
        return BuddyForCausalLM.from_pretrained(
            resolved,
            dtype=named_dtype(execution.dtype),
            merge_adapter=True,
            quant=cast(Any, execution.quant),
            **routing,
            **options,
        )


def load_to_run(
    name: "ModelName",
    check: "Callable[[InferenceModel], object]",
    console: "Console",
    execution: ExecutionOptions,
    *,
    needs_all: "Callable[[InferenceModel], bool]" = lambda outline: False,
) -> "InferenceModel":
    """Load a model whose sessions are run; transformers' `generate` it has only where it must.

    Args:
        name: As for `load_checked`, and so are the next three.
        check: The same.
        console: The same.
        execution: The same.
        needs_all: Given the model without weights, whether it must be a `BuddyForCausalLM`.

    Raises:
        BuddyError: As `load_checked`.
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.views.display import fetch_progress
    from buddy.hub.loading import named_dtype
    from buddy.inference import InferenceModel

    with fetch_progress(console) as on_progress:
        resolved = resolve(name)
        routing = _routing(execution, on_progress)
        outline = InferenceModel.describe(resolved, **routing)
        check(outline)
        options: dict[str, Any] = {
            "dtype": named_dtype(execution.dtype),
            "quant": cast(Any, execution.quant),
            **routing,
        }
        if not needs_all(outline):
            model = InferenceModel.load(resolved, **options)
            if not needs_all(model):  # what was not fetched yet may ask for more
                return model
        from buddy.model import BuddyForCausalLM

        return BuddyForCausalLM.from_pretrained(resolved, merge_adapter=True, **options)


def _routing(execution: ExecutionOptions, on_progress: Any) -> dict[str, Any]:
    return {
        "policy": execution.policy,
        "kv_policy": execution.kv_policy,
        "engine": execution.engine,
        "on_progress": on_progress,
    }


def load_to_measure(
    name: "ModelName",
    tokens: int,
    console: "Console",
    *,
    dtype: str | None,
    check: "Callable[[BuddyForCausalLM], object]",
) -> "BuddyForCausalLM":
    """Load a model all of whose blocks run, to measure them on texts.

    Args:
        name: As for `load_checked`.
        tokens: How long the texts are.
        console: Where progress is shown.
        dtype: As `--dtype` takes it; as saved if None.
        check: The same.

    Raises:
        BuddyError: What `check` raises; or the texts do not fit the context, or no such model, or
            several devices are named.
    """
    from buddy.hub.device import pick_device

    def check_all(outline: "BuddyForCausalLM") -> None:
        check(outline)
        check_room(outline, tokens)

    execution, device = replace(FULL, dtype=dtype), pick_device(None)
    loaded = load_checked(name, check_all, console, execution, device=device)
    say_if_slow(loaded, console)
    return loaded


def computed_by(model: "BuddyForCausalLM") -> dict[str, Any]:
    """What the values of a measurement depend on besides its settings, for its identity."""
    return {
        "model": model.facts(),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "attention": model.backbone.attention,
        "quant": model.origin.quant,
    }


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
