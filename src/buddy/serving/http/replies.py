"""Events of the engine become OpenAI's answers: whole, or as chunks of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from buddy import __version__
from buddy.serving.http import schema
from buddy.serving.http.prompts import PromptReader, finite
from buddy.serving.request import Delta, Finished, FinishReason, TokenLogprobs

DONE: Final = b"data: [DONE]\n\n"
"""Ends a stream."""


@dataclass(slots=True)
class Answer:
    """One answer, as far as it has come."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_begun: bool = False
    finished: Finished | None = None

    @property
    def reason(self) -> FinishReason:
        """Why it has ended, once it has."""
        assert self.finished is not None
        return self.finished.reason


class ChatShape:
    """What `/v1/chat/completions` does its own way; `logprobs` of a choice are what it made."""

    prefix: str = "chatcmpl"
    object: str = "chat.completion"
    chunk: schema.ChunkObject = "chat.completion.chunk"

    def part(
        self, index: int, text: str, logprobs: Any, reason: FinishReason | None, *, is_first: bool
    ) -> schema.ChatPart:
        """A delta, the first one with the role."""
        if is_first:
            delta = schema.ChatDelta(role="assistant", content=text)
        else:
            delta = schema.ChatDelta(content=text) if text else schema.ChatDelta()
        return schema.ChatPart(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)

    def choice(self, index: int, answer: Answer, logprobs: Any) -> schema.ChatChoice:
        """A message."""
        return schema.ChatChoice(
            index=index,
            message=schema.AnswerMessage(role="assistant", content=answer.text, refusal=None),
            logprobs=logprobs,
            finish_reason=answer.reason,
        )

    def logprobs(self, given: Sequence[TokenLogprobs], reader: PromptReader) -> schema.ChatLogprobs:
        """A list of tokens, each with its alternatives."""
        content = [
            schema.ChatLogprob(
                **_top(token.token, token.logprob, reader),
                top_logprobs=[_top(*other, reader) for other in token.top],
            )
            for token in given
        ]
        return schema.ChatLogprobs(content=content, refusal=None)


class CompletionShape:
    """What `/v1/completions` does its own way."""

    prefix: str = "cmpl"
    object: str = "text_completion"
    chunk: schema.ChunkObject = "text_completion"

    def part(
        self, index: int, text: str, logprobs: Any, reason: FinishReason | None, *, is_first: bool
    ) -> schema.CompletionPart:
        """The text."""
        return schema.CompletionPart(
            index=index, text=text, logprobs=logprobs, finish_reason=reason
        )

    def choice(self, index: int, answer: Answer, logprobs: Any) -> schema.CompletionChoice:
        """A text."""
        return schema.CompletionChoice(
            index=index, text=answer.text, logprobs=logprobs, finish_reason=answer.reason
        )

    def logprobs(
        self, given: Sequence[TokenLogprobs], reader: PromptReader
    ) -> schema.CompletionLogprobs:
        """Lists side by side."""
        tops: list[dict[str, float]] = []
        for token in given:
            tops.append({})
            # The drawn token is always there; of tokens with one name, the first is the best.
            for other, value in (*token.top, (token.token, token.logprob)):
                tops[-1].setdefault(reader.token_text(other)[0], finite(value))
        return schema.CompletionLogprobs(
            tokens=[reader.token_text(token.token)[0] for token in given],
            token_logprobs=[finite(token.logprob) for token in given],
            top_logprobs=tops,
            text_offset=[token.offset for token in given],
        )


Shape = ChatShape | CompletionShape


def _top(token: int, value: float, reader: PromptReader) -> schema.TopLogprob:
    text, utf8 = reader.token_text(token)
    return schema.TopLogprob(token=text, logprob=finite(value), bytes=utf8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """What a client wants besides the text."""

    logprobs: bool = False
    usage: bool = False
    """Usage in a stream; a whole answer always has it."""
    depth: bool = False
    """Which blocks ran, in a stream."""


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
        self._answers = [Answer() for _ in range(num_answers)]
        self._head = schema.Head(
            id=f"{shape.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            system_fingerprint=f"buddy-{__version__}",
        )

    def add(self, index: int, delta: Delta) -> None:
        """Keep what came of an answer, to be given whole."""
        self._answers[index].text += delta.text
        self._answers[index].logprobs.extend(delta.logprobs)

    def end(self, index: int, finished: Finished) -> None:
        """An answer has ended."""
        self._answers[index].finished = finished

    @property
    def is_long(self) -> bool:
        """Whether it may take seconds to write."""
        return self._extras.logprobs

    def whole(self) -> bytes:
        """The answer, once all choices have ended; other threads have their turn between two."""
        choices = (
            _compact(self._shape.choice(index, answer, self._logprobs(answer.logprobs)))
            for index, answer in enumerate(self._answers)
        )
        head = _compact({**self._head, "object": self._shape.object})
        usage = _compact(self.usage())
        return f'{head[:-1]},"choices":[{",".join(choices)}],"usage":{usage}}}'.encode()

    def chunk(self, index: int, delta: Delta) -> bytes:
        """What came of an answer, as an event of the stream; nothing where it says nothing."""
        extras, has_begun = self._extras, self._answers[index].has_begun
        shows_tokens = bool(delta.tokens) and (extras.logprobs or extras.depth)
        if not (delta.text or shows_tokens) and has_begun:
            return b""
        more = schema.ChunkExtras()
        if extras.depth:
            runs = ["".join("01"[bool(ran)] for ran in blocks) for blocks in delta.runs]
            more["buddy"] = schema.DepthRuns(runs=runs)
        return self._part(index, delta.text, self._logprobs(delta.logprobs), None, more)

    def last_chunk(self, index: int) -> bytes:
        """Why an answer has ended."""
        return self._part(index, "", None, self._answers[index].reason, schema.ChunkExtras())

    def closing(self) -> bytes:
        """The end of the stream: usage, where it is wanted, and `[DONE]`."""
        if not self._extras.usage:
            return DONE
        return self._event([], schema.ChunkExtras(usage=self.usage())) + DONE

    def usage(self) -> schema.UsageBody:
        """What all choices took; the tokens of a prompt count once."""
        used = [answer.finished.usage for answer in self._answers if answer.finished is not None]
        prompts = used[:: self._per_prompt]
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        completion_tokens = sum(usage.completion_tokens for usage in used)
        lowered = [usage.lowered_from for usage in used if usage.lowered_from is not None]
        in_answers = sum(usage.blocks_per_token * usage.completion_tokens for usage in used)
        return schema.UsageBody(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=schema.PromptDetails(
                cached_tokens=sum(usage.cached_tokens for usage in prompts)
            ),
            buddy=schema.DepthUsage(
                budget_blocks=max(usage.budget_blocks for usage in used),
                blocks_executed=sum(usage.blocks_executed for usage in used),
                blocks_per_token=in_answers / max(1, completion_tokens),
                num_blocks=self._num_blocks,
                distinct_plans=max(usage.distinct_plans for usage in used),
                source=used[0].source,
                lowered_from=max(lowered, default=None),
            ),
        )

    def _logprobs(
        self, given: Sequence[TokenLogprobs]
    ) -> schema.ChatLogprobs | schema.CompletionLogprobs | None:
        return self._shape.logprobs(given, self._reader) if self._extras.logprobs else None

    def _part(
        self,
        index: int,
        text: str,
        logprobs: Any,
        reason: FinishReason | None,
        more: schema.ChunkExtras,
    ) -> bytes:
        answer = self._answers[index]
        part = self._shape.part(index, text, logprobs, reason, is_first=not answer.has_begun)
        answer.has_begun = True
        return self._event([part], more)

    def _event(
        self, parts: list[schema.ChatPart | schema.CompletionPart], more: schema.ChunkExtras
    ) -> bytes:
        if self._extras.usage:
            more = schema.ChunkExtras(usage=None) | more  # null in all chunks but the last
        return event(schema.Chunk(**self._head, object=self._shape.chunk, choices=parts, **more))


def _compact(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(body: schema.Chunk | schema.ErrorBody) -> bytes:
    """One server-sent event; ASCII, as some readers take every Unicode line end for one."""
    return f"data: {json.dumps(body)}\n\n".encode()
