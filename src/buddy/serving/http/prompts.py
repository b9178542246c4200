"""Messages and prompts become token ids, and token ids the texts that log-probabilities show."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from buddy.data.chat import apply_chat
from buddy.data.tokens import encode
from buddy.errors import PromptError, shown
from buddy.hub.wrap_errors import explained
from buddy.serving.http.schema import Message
from buddy.serving.http.token_bytes import TokenBytes


class PromptReader:
    """Reads what clients send with the tokenizer of the served model.

    Tokenizers are not made for several threads at once: one calls it at a time.

    Args:
        tokenizer: A Hugging Face tokenizer.
        vocabulary: How many token ids the model knows; None = as many as the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = len(tokenizer) if vocabulary is None else vocabulary

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @property
    def has_chat(self) -> bool:
        """Whether the model knows a form for conversations."""
        return self._tokenizer.chat_template is not None

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            PromptError: There is no template, it refuses the conversation, or a text is no Unicode.
        """
        if not self.has_chat:
            raise PromptError(
                "this model has no chat template, so it takes no messages: send a prompt to "
                "/v1/completions"
            )
        plain = [
            {"role": _role(message.role), "content": _whole(message.text)} for message in messages
        ]
        try:
            encoding = apply_chat(self._tokenizer, plain, return_dict=True)
        except PromptError as error:  # it says where the model lies, which clients need not know
            cause = error.__cause__
            raise PromptError(
                "the model's chat template refuses this conversation: "
                f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"
            ) from error
        return self._checked(encoding["input_ids"])

    def prompts(
        self, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt of a completion.

        Args:
            prompt: A text, token ids, or a list of either.

        Raises:
            PromptError: A prompt has no tokens, one that the model does not know, or is no Unicode.
        """
        if isinstance(prompt, str):
            return [self._of_text(prompt)]
        if isinstance(prompt[0], int):
            return [self._checked(prompt)]
        return [
            self._of_text(item) if isinstance(item, str) else self._checked(item) for item in prompt
        ]

    def bias(self, given: dict[str, float] | None) -> dict[int, float]:
        """`logit_bias` by token id.

        Raises:
            PromptError: A key is no token id.
        """
        biases = {}
        for name, value in (given or {}).items():
            token = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else None
            if token is None or token >= self._vocabulary:
                raise PromptError(
                    f"logit_bias: expected token ids below {self._vocabulary}, got {shown(name)}"
                )
            biases[token] = float(value)
        return biases

    def token_text(self, token: int) -> tuple[str, list[int]]:
        r"""A token alone, and its UTF-8 bytes; a part of a character is called `bytes:\xe2\x80`."""
        utf8 = self._bytes.of(token)
        try:
            return utf8.decode(), list(utf8)
        except UnicodeDecodeError:
            return f"bytes:{str(utf8)[2:-1]}", list(utf8)

    def _of_text(self, text: str) -> tuple[int, ...]:
        with explained("the model's tokenizer cannot read this text", "send another"):
            ids = encode(self._tokenizer, _whole(text))
        return self._checked(ids)

    def _checked(self, ids: Any) -> tuple[int, ...]:
        if not ids:
            raise PromptError("the prompt is empty: write what the model is to continue")
        if max(ids) >= self._vocabulary:
            raise PromptError(
                f"prompt: expected token ids below {self._vocabulary}, got {max(ids)}"
            )
        return tuple(ids)


def _role(name: str) -> str:
    """OpenAI's newer name for system messages is unknown to templates."""
    return "system" if name == "developer" else name


def _whole(text: str) -> str:
    """A text that can be written in UTF-8.

    Raises:
        PromptError: JSON may escape half of a pair alone, for which there are no bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start + 1} of the text is half a character (a lone surrogate, "
            f"{shown(text[error.start])}): send valid Unicode"
        ) from error
    return text


def finite(logprob: float) -> float:
    """A log-probability as JSON can write it; OpenAI writes impossible as -9999."""
    return logprob if math.isfinite(logprob) else -9999.0
