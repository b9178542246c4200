"""Messages and prompts become token ids, and token ids the texts that log-probabilities show."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

from buddy.budget.thinking import ThinkingMarks
from buddy.data.chat import apply_chat
from buddy.data.template_variables import reads_variable, refused_variable
from buddy.data.tokens import encode
from buddy.errors import PromptError, shown
from buddy.hub.wrap_errors import explained
from buddy.serving.http.bodies import Message
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.token_bytes import TokenBytes
from buddy.serving.http.tool_calls import CallFormat, format_of, new_id

_UNREADABLE: Final = "the model's tokenizer cannot read this text", "send another"
_LONG: Final = 4
"""Characters that a token has on average, at most as long as a text needs no closer look."""
_PIECE: Final = 8192
"""Characters of a long text that are looked at together."""
_CUT: Final = 64
"""Tokens that a piece may have more than it has within its text, of a word cut in two."""
_MOST_TEXTS: Final = 2**16
"""Tokens whose texts are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages, and how the chat template is to write them."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call, as OpenAI describes them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    opens_answer: bool = True
    """Whether it ends where an answer begins."""
    goes_on: bool = False
    """Whether it ends within its last message."""
    adds_special: bool = False
    """Whether the tokens are added that the tokenizer adds to a text."""


class PromptReader:
    """Reads what clients send with the tokenizer of the served model.

    Tokenizers are not made for several threads at once: one calls it at a time.

    Args:
        tokenizer: A Hugging Face tokenizer.
        vocabulary: How many token ids the model knows; None = as many as the tokenizer.
        context: Tokens that a prompt may have; None = any number.

    Attributes:
        vocabulary: How many token ids the model knows.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int | None = None, context: int | None = None
    ) -> None:
        self._tokenizer, self._context = tokenizer, context
        self.vocabulary = len(tokenizer) if vocabulary is None else vocabulary
        self._texts = lru_cache(_MOST_TEXTS)(self._text_of)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @cached_property
    def added(self) -> dict[str, int]:
        """Tokens that stand for one text each, such as marks of a template, by their texts."""
        tokens = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items()}

    @cached_property
    def special(self) -> dict[str, int]:
        """Those of them that are no text."""
        tokens = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}

    @property
    def has_chat(self) -> bool:
        """Whether the model knows a form for conversations."""
        return self._tokenizer.chat_template is not None

    @cached_property
    def thinking(self) -> ThinkingMarks | None:
        """The marks around what the model thinks aloud; None where it does not."""
        return ThinkingMarks.of(self._tokenizer)

    @cached_property
    def calls(self) -> CallFormat | None:
        """How the model calls tools; None where its chat template teaches it nothing of them."""
        return (
            format_of(str(self._tokenizer.chat_template))
            if reads_variable(self._tokenizer, "tools")
            else None
        )

    def chat(self, chat: Conversation) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            PromptError: There is no template, it refuses the conversation or knows nothing of what
                is asked of it, or a text is no Unicode.
            Refusal: The conversation is far too long.
        """
        if not self.has_chat:
            raise PromptError(
                "this model has no chat template, so it takes no messages: send a prompt to "
                "/v1/completions"
            )
        variables = {name: value for name, value in chat.variables.items() if value is not None}
        if (refused := refused_variable(self._tokenizer, variables)) is not None:
            param = f"chat_template_kwargs.{refused[0]}"
            raise Refusal(400, f"{param}: {refused[1]}", param=param, code="unsupported")
        if chat.tools and self.calls is None:
            raise Refusal(
                400,
                "the model's chat template teaches it no calls of tools: leave tools out, or serve "
                "a model that was trained to call them",
                param="tools",
                code="unsupported",
            )
        plain = [self._plain(message, place) for place, message in enumerate(chat.messages)]
        texts = [*(message["content"] for message in plain), json.dumps(chat.tools)]
        self._check_length(texts, "messages")
        options = {"tools": list(chat.tools)} if chat.tools else {}
        try:
            text = apply_chat(
                self._tokenizer,
                plain,
                tokenize=False,
                add_generation_prompt=chat.opens_answer,
                continue_final_message=chat.goes_on,
                **options,
                **variables,
            )
        except PromptError as error:  # it says where the model lies, which clients need not know
            cause = error.__cause__
            raise PromptError(
                "the model's chat template refuses this conversation: "
                f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"
            ) from error
        return self._of_text(text, adds_special=chat.adds_special)

    def _plain(self, message: Message, place: int) -> dict[str, Any]:
        """A message as templates take it: with the arguments of calls as an object."""
        plain: dict[str, Any] = {"role": _role(message.role), "content": _whole(message.text)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                plain[name] = _whole(value)
        if message.tool_calls:
            where = f"messages.{place}.tool_calls"
            if not reads_variable(self._tokenizer, "tool_calls"):
                raise Refusal(
                    400,
                    "the model's chat template has no place for calls of tools: leave tool_calls "
                    "out",
                    param=where,
                    code="unsupported",
                )
            plain["tool_calls"] = [
                {
                    "id": call.id or new_id(),
                    "type": "function",
                    "function": {
                        "name": _whole(call.function.name),
                        "arguments": _object(
                            call.function.arguments, f"{where}.{number}.function.arguments"
                        ),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        return plain

    def prompts(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        adds_special: bool = True,
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt of a completion.

        Args:
            prompt: A text, token ids, or a list of either.
            adds_special: Whether a text gets the tokens that the tokenizer's rule adds to it.

        Raises:
            PromptError: A prompt has no tokens, one that the model does not know, or is no Unicode.
        """
        if isinstance(prompt, str):
            return [self._of_text(prompt, adds_special=adds_special)]
        if isinstance(prompt[0], int):
            return [self._checked(prompt)]
        return [
            self._of_text(item, adds_special=adds_special)
            if isinstance(item, str)
            else self._checked(item)
            for item in prompt
        ]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included.

        Raises:
            PromptError: The model does not know one.
        """
        return str(self._tokenizer.backend_tokenizer.decode(list(self._checked(tokens)), False))

    def bias(self, given: dict[str, float] | None) -> dict[int, float]:
        """`logit_bias` by token id.

        Raises:
            PromptError: A key is no token id.
        """
        biases = {}
        for name, value in (given or {}).items():
            token = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else None
            if token is None or token >= self.vocabulary:
                raise PromptError(
                    f"logit_bias: expected token ids below {self.vocabulary}, got {shown(name)}"
                )
            biases[token] = float(value)
        return biases

    def special_token(self, text: str) -> int | None:
        """The special token that is written so; None where it is a text.

        Raises:
            PromptError: It is a text with a special token in it, which no answer has.
        """
        if text in self.special:
            return self.special[text]
        for special in self.special:
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

    def _of_text(self, text: str, *, adds_special: bool) -> tuple[int, ...]:
        self._check_length([_whole(text)], "prompt")
        with explained(*_UNREADABLE):
            if adds_special:
                return self._checked(encode(self._tokenizer, text))
            plain = self._tokenizer(text, add_special_tokens=False, verbose=False)
            return self._checked(plain.input_ids)

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
        if max(ids) >= self.vocabulary:
            raise PromptError(f"prompt: expected token ids below {self.vocabulary}, got {max(ids)}")
        return tuple(ids)


def _object(text: str, place: str) -> dict[str, Any]:
    """A JSON object that is given as text.

    Raises:
        Refusal: It is none.
    """
    try:
        value = json.loads(_whole(text) or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refusal(
            400,
            f"{place}: expected a JSON object as text, got {shown(text)}",
            param=place,
            code="invalid_value",
        )
    return value


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
