"""Buddy: budget-driven dynamic depth routing for large language models.

Names are loaded when first used, so that `import buddy` costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "BuddyForCausalLM": "buddy.model",
    "RoutedOutput": "buddy.generation.output",
    "DepthTrace": "buddy.generation.trace",
    "load_tokenizer": "buddy.checkpoint.resolve",
    "Budget": "buddy.budget.blocks",
    "DepthPlan": "buddy.depth.plan",
    "select_blocks": "buddy.depth.select",
    "BuddyError": "buddy.errors",
}

__all__ = [
    "BuddyError",
    "BuddyForCausalLM",
    "Budget",
    "DepthPlan",
    "DepthTrace",
    "RoutedOutput",
    "load_tokenizer",
    "select_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'buddy' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
