"""Variables of a chat template that a user may set, such as `enable_thinking`."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from buddy.errors import shown

_CODE: Final = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_OWN: Final = frozenset(
    {
        *("self", "tokenizer", "conversation", "messages", "tools", "documents", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "padding"),
        *("return_dict", "return_tensors", "return_assistant_tokens_mask", "truncation"),
        *("sanitize_control_tokens", "max_length", "tokenizer_kwargs"),
    }
)
"""Names of what Buddy and transformers give a template themselves."""


def reads_variable(tokenizer: Any, name: str) -> bool:
    """Whether a tokenizer's chat template has a variable or field of this name."""
    return re.search(rf"\b{re.escape(name)}\b", _code(str(tokenizer.chat_template))) is not None


@lru_cache(8)
def _code(template: str) -> str:
    """The code of a template, without the text that it writes."""
    return "\n".join(_CODE.findall(template))


def refused_variable(tokenizer: Any, variables: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first variable that a tokenizer's chat template would not obey, and why; None if none is.

    `enable_thinking` that is off suits any template: one without it opens no thinking.
    """
    for name, value in variables.items():
        if name == "enable_thinking" and not isinstance(value, bool):
            return name, f"expected true or false, got {shown(value)}"
        is_asked = name != "enable_thinking" or value
        if name in _OWN or (is_asked and not reads_variable(tokenizer, name)):
            return name, "the model's chat template has no such variable: leave it out"
    return None
