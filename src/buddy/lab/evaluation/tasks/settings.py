"""Settings of Buddy in lm-evaluation-harness: its own, those of lm-eval that act, and the rest."""

import inspect
import re
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from lm_eval.models.huggingface import HFLM

from buddy.engine.run import check_reroute
from buddy.engine.state.cache import KVPolicy, check_kv_policy
from buddy.errors import PolicyError

ROUTES: Final = ("prompt", "full")
DEFAULT_BATCH: Final = 16
_FOLLOWED: Final = frozenset(
    {
        *("add_bos_token", "max_length", "prefix_token_id", "truncation", "max_batch_size"),
        *("chat_template_args", "enable_thinking", "think_end_token"),
    }
)
"""Settings of lm-eval's `hf` model that act here too."""
_PERMISSIONS: Final = frozenset({"trust_remote_code", "use_fast_tokenizer"})
"""Those that allow what Buddy never does, or does always."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How many blocks run, and who chooses them: what `--model_args` takes."""

    budget: str | float | int | None = None
    """Blocks as a caller writes them; full depth if not given."""
    policy: str | None = None
    """Who chooses the blocks; the model's own if not given."""
    route_on: str = "prompt"
    """`full` lets the route see the answers too, as harnesses that leak do. Only to reproduce
    their figures."""
    reroute: str | int = "step"
    """When generation chooses again."""
    kv_policy: KVPolicy | None = None
    """What a skipped block leaves in its KV cache; the model's own if not given."""
    thinking_tokens: int | None = None
    """Most tokens of thinking, which its closing mark then ends; any number if not given."""

    def __post_init__(self) -> None:
        if self.route_on not in ROUTES:
            raise PolicyError(f"route_on must be one of {', '.join(ROUTES)}, got {self.route_on!r}")
        if self.kv_policy is not None:
            check_kv_policy(self.kv_policy)
        check_reroute(cast(Any, self.reroute))


def followed(settings: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Settings of lm-eval's `hf` model that act here; those that ask for nothing are left out.

    Raises:
        PolicyError: One is unknown, or would do nothing.
    """
    known = inspect.signature(HFLM.__init__).parameters
    for name, value in settings.items():
        is_known = name in known and name not in ("self", "kwargs")
        if name in _FOLLOWED | _PERMISSIONS or (is_known and value in (None, known[name].default)):
            continue
        what = f"{name}={str(value)[:80]} does nothing here" if is_known else f"no setting {name}"
        raise PolicyError(
            f"{what}: expected one of {', '.join(sorted(own | _FOLLOWED))}; adapters, revisions "
            "(ORG/NAME@REVISION) and GGUF files are named by pretrained"
        )
    return {name: value for name, value in settings.items() if name in _FOLLOWED}


def batch_of(batch_size: int | str | None, most: int | None) -> int:
    """How many questions run at a time; `auto`, in any form, is a fixed number.

    Raises:
        PolicyError: It is no number, or not above 0.
    """
    if batch_size is None or re.fullmatch(r"auto(:\d+(\.\d+)?)?", str(batch_size)):
        batch_size = min(DEFAULT_BATCH, DEFAULT_BATCH if most is None else int(most))
    if not re.fullmatch(r"[1-9]\d*", str(batch_size)):
        raise PolicyError(f"batch_size must be a number above 0 or auto, got {batch_size!r}")
    return int(batch_size)


def number_format(dtype: Any) -> torch.dtype | None:
    """The number format of weights; None leaves them as saved.

    Raises:
        PolicyError: There is none of that name.
    """
    if dtype in (None, "auto"):
        return None
    number = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not (isinstance(number, torch.dtype) and number.is_floating_point):
        raise PolicyError(f"dtype must be auto or such as bfloat16 or float32, got {dtype!r}")
    return number
