"""Messages and prompts become token ids, and token ids the texts that log-probabilities show."""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

from buddy.data.chat import apply_chat
from buddy.data.tokens import encode
from buddy.errors import PromptError, shown
from buddy.hub.wrap_errors import explained
from buddy.serving.http.bodies import Message
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.token_bytes import TokenBytes

_UNREADABLE: Final = "the model's tokenizer cannot read this text", "send another"
_LONG: Final = 4
"""Characters that a token has on average, at most as long as a text needs no closer look."""
_PIECE: Final = 8192
"""Characters of a long text that are looked at together."""
_CUT: Final = 64
"""Tokens that a piece may have more than it has within its text, of a word cut in two."""
_MOST_TEXTS: Final = 2**16
"""Tokens whose texts are remembered."""


class PromptReader:
    """Reads what clients send with the tokenizer of the served model.

    Tokenizers are not made for several threads at once: one calls it at a time.

    Args:
        tokenizer: A Hugging Face tokenizer.
        vocabulary: How many token ids the model knows; None = as many as the tokenizer.
        context: Tokens that a prompt may have; None = any number.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int | None = None, context: int | None = None
    ) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._vocabulary = len(tokenizer) if vocabulary is None else vocabulary
        self._texts = lru_cache(_MOST_TEXTS)(self._text_of)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @cached_property
    def _special(self) -> dict[str, int]:
        tokens = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}

    @property
    def has_chat(self) -> bool:
        """Whether the model knows a form for conversations."""
        return self._tokenizer.chat_template is not None

    def chat(self, messages: Sequence[Message], *, thinks: bool | None = None) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template.

        Args:
            messages: The conversation.
            thinks: Whether the model is to think aloud first; None = as it was trained, not.

        Raises:
            PromptError: There is no template, it refuses the conversation or knows nothing of
                thinking, or a text is no Unicode.
            Refusal: The conversation is far too long.
        """
        if not self.has_chat:
            raise PromptError(
                "this model has no chat template, so it takes no messages: send a prompt to "
                "/v1/completions"
            )
        if thinks and "enable_thinking" not in str(self._tokenizer.chat_template):
            raise PromptError(
                "the model's chat template knows nothing of enable_thinking: leave it out"
            )
        plain = [
            {"role": _role(message.role), "content": _whole(message.text)}
            | ({} if message.name is None else {"name": _whole(message.name)})
            for message in messages
        ]
        self._check_length([message["content"] for message in plain], "messages")
        try:
            encoding = apply_chat(
                self._tokenizer, plain, return_dict=True, enable_thinking=bool(thinks)
            )
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

    def special_token(self, text: str) -> int | None:
        """The special token that is written so; None where it is a text.

        Raises:
            PromptError: It is a text with a special token in it, which no answer has.
        """
        if text in self._special:
            return self._special[text]
        for special in self._special:
            if special in text:
                raise PromptError(
                    f"{shown(text)} has the special token {special} in it, which is never in an "
                    "answer's text: send the token alone"
                )
        return None

    def token_text(self, token: int) -> tuple[str, list[int]]:
        r"""A token alone, and its UTF-8 bytes; a part of a character is called `bytes:\xe2\x80`."""
        return self._texts(token)

    def _text_of(self, token: int) -> tuple[str, list[int]]:
        utf8 = self._bytes.of(token)
        try:
            return utf8.decode(), list(utf8)
        except UnicodeDecodeError:
            return f"bytes:{str(utf8)[2:-1]}", list(utf8)

    def _of_text(self, text: str) -> tuple[int, ...]:
        self._check_length([_whole(text)], "prompt")
        with explained(*_UNREADABLE):
            ids = encode(self._tokenizer, text)
        return self._checked(ids)

    def _check_length(self, texts: Sequence[str], param: str) -> None:
        """Refuse texts that are far too long for the context, before they are read whole.

        Raises:
            Refusal: They are.
        """
        most = self._context
        if most is None or sum(map(len, texts)) <= _LONG * most:
            return
        count = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                piece = text[start : start + _PIECE]
                with explained(*_UNREADABLE):
                    ids = self._tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
                count += max(0, len(ids) - _CUT)
                if count > most:
                    raise Refusal(
                        400,
                        f"the prompt has more tokens than the context of {most}: send less",
                        param=param,
                        code="context_length_exceeded",
                    )

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
