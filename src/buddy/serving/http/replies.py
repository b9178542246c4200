"""Events of the engine become OpenAI's answers: whole, or as chunks of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from buddy import __version__
from buddy.budget.resolved import Phase
from buddy.serving.http import schema
from buddy.serving.http.echo import Echo
from buddy.serving.http.prompts import PromptReader, finite
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.speech import Said, Speech
from buddy.serving.http.tool_calls import Call
from buddy.serving.request import Delta, Finished, PromptScores, TokenLogprobs, Usage

DONE: Final = b"data: [DONE]\n\n"
"""Ends a stream."""


@dataclass(slots=True)
class Answer:
    """One answer, as far as it has come."""

    speech: Speech = field(default_factory=Speech)
    """Parts its text."""
    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: PromptScores | None = None
    """Scores of its prompt."""
    has_begun: bool = False
    finished: Finished | None = None

    def take(self, said: Said) -> Said:
        """Keep a piece of it."""
        self.text += said.text
        self.thought += said.thought
        self.calls += said.calls
        return said

    @property
    def reason(self) -> schema.End:
        """Why it has ended, once it has."""
        assert self.finished is not None
        is_called = bool(self.calls) and self.finished.reason == "stop"
        return "tool_calls" if is_called else self.finished.reason


class ChatShape:
    """What `/v1/chat/completions` does its own way; `logprobs` of a choice are what it made."""

    prefix: str = "chatcmpl"
    object: str = "chat.completion"
    chunk: schema.ChunkObject = "chat.completion.chunk"
    scores_by_choice: bool = False
    """Whether `prompt_logprobs` stand in each choice; else once, beside them."""

    def part(
        self, index: int, answer: Answer, said: Said, logprobs: Any, reason: schema.End | None
    ) -> schema.ChatPart:
        """A delta, the first one with the role."""
        delta = schema.ChatDelta()
        if not answer.has_begun:
            delta["role"] = "assistant"
        if said.text or not (answer.has_begun or said.thought or said.calls):
            delta["content"] = said.text
        if said.thought:
            delta["reasoning_content"] = said.thought
        if said.calls:
            first = len(answer.calls) - len(said.calls)
            delta["tool_calls"] = [
                schema.ToolCallPart(index=place, **_call(call))
                for place, call in enumerate(said.calls, first)
            ]
        return schema.ChatPart(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)

    def choice(self, index: int, answer: Answer, logprobs: Any) -> schema.ChatChoice:
        """A message."""
        is_silent = bool(answer.calls) and not answer.text
        message = schema.AnswerMessage(
            role="assistant", content=None if is_silent else answer.text, refusal=None
        )
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return schema.ChatChoice(
            index=index, message=message, logprobs=logprobs, finish_reason=answer.reason
        )

    def logprobs(self, given: Sequence[TokenLogprobs], reader: PromptReader) -> schema.ChatLogprobs:
        """A list of tokens, each with its alternatives."""
        content = [
            schema.ChatLogprob(
                **_top(token.token, token.logprob, reader),
                top_logprobs=[_top(*other, reader) for other in _with_own(token)],
            )
            for token in given
        ]
        return schema.ChatLogprobs(content=content, refusal=None)


class CompletionShape:
    """What `/v1/completions` does its own way."""

    prefix: str = "cmpl"
    object: str = "text_completion"
    chunk: schema.ChunkObject = "text_completion"
    scores_by_choice: bool = True

    def part(
        self, index: int, answer: Answer, said: Said, logprobs: Any, reason: schema.End | None
    ) -> schema.CompletionPart:
        """The text."""
        return schema.CompletionPart(
            index=index, text=said.text, logprobs=logprobs, finish_reason=reason
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
        tops: list[dict[str, float] | None] = []
        for token in given:
            named: dict[str, float] = {}
            # The drawn token is always there; of tokens with one name, the first is the best.
            for other, value in (*token.top, (token.token, token.logprob)):
                named.setdefault(reader.token_text(other)[0], finite(value))
            tops.append(named)
        return schema.CompletionLogprobs(
            tokens=[reader.token_text(token.token)[0] for token in given],
            token_logprobs=[finite(token.logprob) for token in given],
            top_logprobs=tops,
            text_offset=[token.offset for token in given],
        )


Shape = ChatShape | CompletionShape


def _call(call: Call) -> schema.ToolCallBody:
    function = schema.FunctionBody(name=call.name, arguments=call.arguments)
    return schema.ToolCallBody(id=call.id, type="function", function=function)


def _with_own(drawn: TokenLogprobs) -> Sequence[tuple[int, float]]:
    """The most likely tokens, where any are wanted, and the drawn one if it is none of them."""
    if not drawn.top or any(token == drawn.token for token, _ in drawn.top):
        return drawn.top
    return (*drawn.top, (drawn.token, drawn.logprob))


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
        speeches: Part the text of each choice; by default all of it is said.
        echoes: What answers say of each prompt; by default nothing.
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
        speeches: Sequence[Speech] = (),
        echoes: Sequence[Echo] = (),
    ) -> None:
        self._shape, self._extras, self._reader = shape, extras, reader
        self._num_blocks, self._per_prompt = num_blocks, per_prompt
        echoes = echoes or [Echo(tokens=())] * (num_answers // per_prompt)
        self._echoes = [echo for echo in echoes for _ in range(per_prompt)]
        speeches = speeches or [Speech() for _ in range(num_answers)]
        self._answers = [
            Answer(speech, text=echo.text)
            for speech, echo in zip(speeches, self._echoes, strict=True)
        ]
        self._head = schema.Head(
            id=f"{shape.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            system_fingerprint=f"buddy-{__version__}",
        )

    def opening(self) -> bytes:
        """What a stream begins with."""
        return b""

    def failure(self, refusal: Refusal) -> bytes:
        """The last event of a stream of which an answer has failed."""
        return event(refusal.body())

    def add(self, index: int, delta: Delta) -> None:
        """Keep what came of an answer, to be given whole."""
        answer = self._answers[index]
        answer.take(answer.speech.push(delta.text))
        answer.logprobs.extend(delta.logprobs)
        if delta.prompt is not None:
            answer.scores = delta.prompt

    def end(self, index: int, finished: Finished) -> bytes:
        """An answer has ended; gives what was held of its text, as an event of the stream."""
        answer = self._answers[index]
        answer.finished = finished
        said = answer.take(answer.speech.push("", is_last=True))
        return b"" if said.is_empty else self._part(index, said, None, None, schema.ChunkExtras())

    @property
    def is_long(self) -> bool:
        """Whether it may take seconds to write."""
        return self._extras.logprobs or self._echoes[0].prompt_top is not None

    def whole(self) -> bytes:
        """The answer, once all choices have ended; other threads have their turn between two."""
        choices = (_compact(self._choice(index)) for index in range(len(self._answers)))
        head = _compact({**self._head, "object": self._shape.object})
        rest: dict[str, Any] = {"usage": self.usage()}
        if not self._shape.scores_by_choice:
            rest |= self._scores(0)
        return f'{head[:-1]},"choices":[{",".join(choices)}],{_compact(rest)[1:]}'.encode()

    def chunk(self, index: int, delta: Delta) -> bytes:
        """What came of an answer, as an event of the stream; nothing where it says nothing."""
        extras, answer = self._extras, self._answers[index]
        said = answer.take(answer.speech.push(delta.text))
        shows_tokens = bool(delta.tokens or delta.logprobs) and (extras.logprobs or extras.depth)
        if said.is_empty and not shows_tokens and answer.has_begun:
            return b""
        more = schema.ChunkExtras()
        if extras.depth:
            runs = ["".join("01"[bool(ran)] for ran in blocks) for blocks in delta.runs]
            more["buddy"] = schema.DepthRuns(runs=runs)
        logprobs = self._logprobs(index, delta.logprobs, delta.prompt)
        return self._part(index, said, logprobs, None, more)

    def last_chunk(self, index: int) -> bytes:
        """Why an answer has ended."""
        return self._part(index, Said(), None, self._answers[index].reason, schema.ChunkExtras())

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
        depth = schema.DepthUsage(
            budget_blocks=max(usage.budget_blocks for usage in used),
            blocks_executed=sum(usage.blocks_executed for usage in used),
            blocks_per_token=in_answers / max(1, completion_tokens),
            num_blocks=self._num_blocks,
            distinct_plans=max(usage.distinct_plans for usage in used),
            source=used[0].source,
            lowered_from=max(lowered, default=None),
        )
        if phases := _phases(used):
            depth["phases"] = phases
        return schema.UsageBody(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=schema.PromptDetails(
                cached_tokens=sum(usage.cached_tokens for usage in prompts)
            ),
            buddy=depth,
        )

    def _choice(self, index: int) -> dict[str, Any]:
        answer = self._answers[index]
        logprobs = self._logprobs(index, answer.logprobs, answer.scores)
        more = self._scores(index) if self._shape.scores_by_choice else {}
        return {**self._shape.choice(index, answer, logprobs), **more}

    def _scores(self, index: int) -> dict[str, schema.PromptLogprobs]:
        """The field `prompt_logprobs` of an answer, where it is asked for."""
        listed = self._echoes[index].prompt_logprobs(self._answers[index].scores, self._reader)
        return {} if listed is None else {"prompt_logprobs": listed}

    def _logprobs(
        self, index: int, given: Sequence[TokenLogprobs], scores: PromptScores | None
    ) -> Any:
        """The field `logprobs` of an answer or of a chunk."""
        if not self._extras.logprobs:
            return None
        echo = self._echoes[index]
        made: Any = self._shape.logprobs(echo.logprobs(scores, given), self._reader)
        echo.put_first(scores, made, self._reader)
        return made

    def _part(
        self,
        index: int,
        said: Said,
        logprobs: Any,
        reason: schema.End | None,
        more: schema.ChunkExtras,
    ) -> bytes:
        answer = self._answers[index]
        if not answer.has_begun:
            said = replace(said, text=self._echoes[index].text + said.text)
        part = self._shape.part(index, answer, said, logprobs, reason)
        answer.has_begun = True
        return self._event([part], more)

    def _event(
        self, parts: list[schema.ChatPart | schema.CompletionPart], more: schema.ChunkExtras
    ) -> bytes:
        if self._extras.usage:
            more = schema.ChunkExtras(usage=None) | more  # null in all chunks but the last
        return event(schema.Chunk(**self._head, object=self._shape.chunk, choices=parts, **more))


def _phases(used: Sequence[Usage]) -> dict[Phase, schema.PhaseUsageBody]:
    """What the phases of all answers took, where these have budgets of their own."""
    phases: dict[Phase, schema.PhaseUsageBody] = {}
    for phase, spent in (item for usage in used for item in (usage.phases or {}).items()):
        total = phases.setdefault(phase, schema.PhaseUsageBody(tokens=0, blocks_executed=0))
        total["tokens"] += spent.tokens
        total["blocks_executed"] += spent.blocks_executed
    return phases


def _compact(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(body: schema.Chunk | schema.ErrorBody) -> bytes:
    """One server-sent event; ASCII, as some readers take every Unicode line end for one."""
    return f"data: {json.dumps(body)}\n\n".encode()
