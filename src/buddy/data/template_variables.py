"""Variables of a chat template that a user may set, such as `enable_thinking`."""

import re
from collections.abc import Mapping, Set
from functools import lru_cache
from typing import Any, Final

from buddy.errors import shown

_GENERATION: Final = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Marks of transformers' own around what a model writes."""
_CODE: Final = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_OWN: Final = frozenset(
    {
        *("self", "tokenizer", "conversation", "messages", "tools", "documents", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "padding"),
        *("return_dict", "return_tensors", "return_assistant_tokens_mask", "truncation"),
        *("sanitize_control_tokens", "max_length", "tokenizer_kwargs"),
        *("raise_exception", "strftime_now"),
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


@lru_cache(8)
def _free_variables(template: str) -> Set[str]:
    """Variables that a template reads and does not set itself, as it does those of its loops.

    Empty for one that is no Jinja: using it says what is wrong with it.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers' has
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateSyntaxError:
        return frozenset()


def refused_variable(tokenizer: Any, variables: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first variable that a tokenizer's chat template would not obey, and why; None if none is.

    `enable_thinking` that is off suits any template: one without it opens no thinking.
    """
    free = _free_variables(str(tokenizer.chat_template)) if variables else frozenset[str]()
    for name, value in variables.items():
        if name == "enable_thinking" and not isinstance(value, bool):
            return name, f"expected true or false, got {shown(value)}"
        if name in _OWN:
            return name, "it is not for callers to set: leave it out"
        if name not in free and (name != "enable_thinking" or value):
            return name, "the model's chat template has no such variable: leave it out"
    return None
