"""Events of the engine become OpenAI's answers: whole, or as chunks of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from buddy import __version__
from buddy.serving.http.prompts import PromptReader, finite
from buddy.serving.request import Delta, FinishReason, TokenLogprobs, Usage

DONE: Final = b"data: [DONE]\n\n"
"""Ends a stream."""


@runtime_checkable
class Shape(Protocol):
    """What chat and completions do differently."""

    prefix: str
    """Of an answer's id."""
    whole: str
    """`object` of an answer."""
    chunk: str
    """`object` of a chunk."""

    def part(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """New text, as the choice of a chunk has it."""
        ...

    def all(self, text: str) -> dict[str, Any]:
        """All text, as the choice of an answer has it."""
        ...

    def logprobs(self, given: Sequence[TokenLogprobs], reader: PromptReader) -> dict[str, Any]:
        """Of some tokens."""
        ...


class ChatShape:
    """Of `/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def part(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """A delta, the first one with the role."""
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text} if text or is_first else {}}

    def all(self, text: str) -> dict[str, Any]:
        """A message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, given: Sequence[TokenLogprobs], reader: PromptReader) -> dict[str, Any]:
        """A list of tokens, each with its alternatives."""
        content = [
            {
                **_logprob(one.token, one.logprob, reader),
                "top_logprobs": [_logprob(*other, reader) for other in one.top],
            }
            for one in given
        ]
        return {"content": content, "refusal": None}


class CompletionShape:
    """Of `/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def part(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The text."""
        return {"text": text}

    def all(self, text: str) -> dict[str, Any]:
        """The text."""
        return {"text": text}

    def logprobs(self, given: Sequence[TokenLogprobs], reader: PromptReader) -> dict[str, Any]:
        """Lists side by side."""
        tops: list[dict[str, float]] = []
        for one in given:
            tops.append({})
            for token, value in one.top:  # of tokens with one name, the first is the best
                tops[-1].setdefault(reader.token_text(token)[0], finite(value))
        return {
            "tokens": [reader.token_text(one.token)[0] for one in given],
            "token_logprobs": [finite(one.logprob) for one in given],
            "top_logprobs": tops,
            "text_offset": [one.offset for one in given],
        }


def _logprob(token: int, value: float, reader: PromptReader) -> dict[str, Any]:
    text, utf8 = reader.token_text(token)
    return {"token": text, "logprob": finite(value), "bytes": utf8}


@dataclass(slots=True)
class _Choice:
    """One answer, as far as it has come."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_begun: bool = False
    reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """What a client wants besides the text."""

    logprobs: bool = False
    usage: bool = False
    """In a stream; a whole answer always has it."""
    depth: bool = False
    """In a stream."""


class Reply:
    """The answer to one HTTP request.

    Args:
        shape: Chat or completions.
        model: As it is named in the answer.
        num_blocks: Of the model.
        num_answers: Choices, all prompts together.
        per_prompt: Choices of one prompt (`n`): those have the prompt's tokens in common.
        extras: What is wanted besides the text.
        reader: Writes tokens.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        model: str,
        num_blocks: int,
        num_answers: int,
        per_prompt: int,
        extras: Extras,
        reader: PromptReader,
    ) -> None:
        self._shape, self._extras, self._reader = shape, extras, reader
        self._num_blocks, self._per_prompt = num_blocks, per_prompt
        self._choices = [_Choice() for _ in range(num_answers)]
        self._head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"buddy-{__version__}",
        }

    def add(self, index: int, delta: Delta) -> None:
        """Keep what came of an answer, to be given whole."""
        self._choices[index].text += delta.text
        self._choices[index].logprobs.extend(delta.logprobs)

    def end(self, index: int, reason: FinishReason, usage: Usage) -> None:
        """An answer has ended."""
        self._choices[index].reason, self._choices[index].usage = reason, usage

    def whole(self) -> dict[str, Any]:
        """The answer, once all choices have ended."""
        choices = [
            {
                "index": index,
                **self._shape.all(choice.text),
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self._head,
            "object": self._shape.whole,
            "choices": choices,
            "usage": self.usage(),
        }

    def chunk(self, index: int, delta: Delta) -> bytes:
        """What came of an answer, as an event of the stream; nothing where it says nothing."""
        choice = self._choices[index]
        shows_tokens = self._extras.logprobs or self._extras.depth
        if not delta.text and not (delta.tokens and shows_tokens) and choice.has_begun:
            return b""
        made = {
            "index": index,
            **self._shape.part(delta.text, is_first=not choice.has_begun),
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": None,
        }
        choice.has_begun = True
        runs = ["".join("01"[bool(ran)] for ran in one) for one in delta.runs]
        depth = {"buddy": {"runs": runs}} if self._extras.depth else {}
        return self._event([made], depth)

    def last_chunk(self, index: int) -> bytes:
        """Why an answer has ended."""
        choice = self._choices[index]
        made = {
            "index": index,
            **self._shape.part("", is_first=not choice.has_begun),
            "logprobs": None,
            "finish_reason": choice.reason,
        }
        choice.has_begun = True
        return self._event([made], {})

    def closing(self) -> bytes:
        """The end of the stream: usage, where it is wanted, and `[DONE]`."""
        if not self._extras.usage:
            return DONE
        return self._event([], {"usage": self.usage()}) + DONE

    def usage(self) -> dict[str, Any]:
        """Of all choices; the tokens of a prompt count once."""
        used = [choice.usage for choice in self._choices if choice.usage is not None]
        prompts = used[:: self._per_prompt]
        prompt_tokens = sum(one.prompt_tokens for one in prompts)
        completion_tokens = sum(one.completion_tokens for one in used)
        lowered = [one.lowered_from for one in used if one.lowered_from is not None]
        in_answers = sum(one.blocks_per_token * one.completion_tokens for one in used)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
            "buddy": {
                "budget_blocks": max(one.budget_blocks for one in used),
                "blocks_executed": sum(one.blocks_executed for one in used),
                "blocks_per_token": in_answers / max(1, completion_tokens),
                "num_blocks": self._num_blocks,
                "distinct_plans": max(one.distinct_plans for one in used),
                "source": used[0].source,
                "lowered_from": max(lowered, default=None),
            },
        }

    def _logprobs(self, given: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return self._shape.logprobs(given, self._reader) if self._extras.logprobs else None

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._extras.usage else {}
        body = {**self._head, "object": self._shape.chunk, "choices": choices, **usage, **more}
        return event(body)


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event; ASCII, as some readers take every Unicode line end for one."""
    return f"data: {json.dumps(body)}\n\n".encode()
