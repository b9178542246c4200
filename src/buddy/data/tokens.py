"""Tokens around a text: what a tokenizer begins it with, and what ends an answer of a model."""

from typing import Any, Final

from buddy.data.chat import apply_chat

_PROBE: Final = "buddy4711"
"""Text that stands nowhere in a template."""


def begin_of_text(tokenizer: Any) -> list[int]:
    """The token that the tokenizer's own rule puts before a text: one, or none."""
    ids = tokenizer("", verbose=False)["input_ids"]
    return [token for token in ids[:1] if token == tokenizer.bos_token_id]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text by the tokenizer's own rule; what it begins with stands there once."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    is_doubled = ids[:2] == [tokenizer.bos_token_id] * 2 and begin_of_text(tokenizer)
    return ids[1:] if is_doubled else ids


def end_of_turn(tokenizer: Any) -> int | None:
    """The first special token that the model's chat template puts after an answer.

    None where it has no template, or one that puts none there.

    Raises:
        PromptError: The template fails.
    """
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    text = apply_chat(tokenizer, turns, tokenize=False, add_generation_prompt=False)
    _, found, after = text.rpartition(_PROBE)
    ids = tokenizer(after if found else "", add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    return next((token for token in ids if token in added and added[token].special), None)
