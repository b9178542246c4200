"""Events of the engine become an answer of OpenAI's Responses API: whole, or as its many events."""

import json
import uuid
from typing import Any, Final

from buddy.serving.http.refusals import Refusal
from buddy.serving.http.replies import Reply
from buddy.serving.http.responses import ResponsesBody
from buddy.serving.http.speech import Said
from buddy.serving.http.tool_calls import Call
from buddy.serving.request import Delta, Finished

_STATUS: Final = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}

_TEXT_EVENT: Final = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
}


class ResponseReply(Reply):
    """The answer to one request of the Responses API.

    Args:
        body: The request; what it asked for comes back with the answer.
        options: As of `Reply`; there is one choice.
    """

    def __init__(self, body: ResponsesBody, **options: Any) -> None:
        super().__init__(**options)
        self._body, self._number = body, 0
        self._items: list[dict[str, Any]] = []
        """What the answer consists of; the last may go on."""
        self._is_open = False
        self._num_thought = 0

    def opening(self) -> bytes:
        """The events of a stream before the answer."""
        return self._named("response.created", response=self._whole("in_progress")) + self._named(
            "response.in_progress", response=self._whole("in_progress")
        )

    def add(self, index: int, delta: Delta) -> None:
        """Keep what came of the answer, to be given whole."""
        self.chunk(index, delta)

    def end(self, index: int, finished: Finished) -> bytes:
        """The answer has ended; gives what was held of it, as events of the stream."""
        answer = self._answers[index]
        answer.finished = finished
        events = self._say(answer.take(answer.speech.push("", is_last=True)))
        return events + self._close(_STATUS[answer.reason])

    def chunk(self, index: int, delta: Delta) -> bytes:
        """What came of the answer, as events of the stream."""
        answer = self._answers[index]
        said = answer.take(answer.speech.push(delta.text))
        self._num_thought += len(delta.tokens) if answer.speech.is_thinking else 0
        return self._say(said)

    def last_chunk(self, index: int) -> bytes:
        """Nothing: why it has ended stands in the last event."""
        return b""

    def closing(self) -> bytes:
        """The last event, which has the whole answer."""
        status = _STATUS[self._answers[0].reason]
        return self._named(f"response.{status}", response=self._whole(status))

    def failure(self, refusal: Refusal) -> bytes:
        """The last event of an answer that cannot be given."""
        whole = self._whole("failed")
        whole["error"] = {"code": "server_error", "message": refusal.body()["error"]["message"]}
        return self._named("response.failed", response=whole)

    def whole(self) -> bytes:
        """The answer, once it has ended."""
        return json.dumps(self._whole(_STATUS[self._answers[0].reason])).encode()

    # The items

    def _say(self, said: Said) -> bytes:
        events = b""
        if said.thought:
            events += self._text("reasoning", said.thought)
        if said.text:
            events += self._text("message", said.text)
        for call in said.calls:
            events += self._close("completed") + self._call(call)
        return events

    def _text(self, kind: str, text: str) -> bytes:
        """Go on with the last item, if it is of this kind, or begin one."""
        events = b""
        if not self._is_open or self._items[-1]["type"] != kind:
            events += self._close("completed") + self._begin(kind)
        self._items[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return events + self._part_event(f"{_TEXT_EVENT[kind]}.delta", delta=text, **more)

    def _begin(self, kind: str) -> bytes:
        item: dict[str, Any]
        if kind == "reasoning":
            item = {"id": _new_id("rs"), "type": kind, "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _new_id("msg"), "type": kind, "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": []}
        item |= {"status": "in_progress", "content": []}
        self._items.append(item)
        self._is_open = True
        events = self._item_event("added")
        item["content"].append(part)
        return events + self._part_event("response.content_part.added", part=part)

    def _close(self, status: str) -> bytes:
        """End the last item, if it goes on."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        (part,) = item["content"]
        more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
        return (
            self._part_event(f"{_TEXT_EVENT[item['type']]}.done", text=part["text"], **more)
            + self._part_event("response.content_part.done", part=part)
            + self._item_event("done")
        )

    def _call(self, call: Call) -> bytes:
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call.id}
        item |= {"name": call.name, "arguments": "", "status": "in_progress"}
        self._items.append(item)
        events = self._item_event("added")
        item |= {"arguments": call.arguments, "status": "completed"}
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        arguments = "response.function_call_arguments"
        events += self._named(f"{arguments}.delta", delta=call.arguments, **place)
        events += self._named(
            f"{arguments}.done", arguments=call.arguments, name=call.name, **place
        )
        return events + self._item_event("done")

    # The events

    def _part_event(self, name: str, **more: Any) -> bytes:
        place = {"output_index": len(self._items) - 1, "content_index": 0}
        return self._named(name, item_id=self._items[-1]["id"], **place, **more)

    def _item_event(self, what: str) -> bytes:
        place = len(self._items) - 1
        return self._named(f"response.output_item.{what}", output_index=place, item=self._items[-1])

    def _named(self, what: str, **more: Any) -> bytes:
        """An event of the stream; nothing where the answer is given whole."""
        if not self._body.stream:
            return b""
        body = {"type": what, "sequence_number": self._number, **more}
        self._number += 1
        return f"event: {what}\ndata: {json.dumps(body)}\n\n".encode()

    def _whole(self, status: str) -> dict[str, Any]:
        body = self._body.model_dump(mode="json", by_alias=True)
        is_cut = status == "incomplete"
        text = body["text"] or {}
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body["instructions"],
            "max_output_tokens": body["max_output_tokens"],
            "model": self._head["model"],
            "output": self._items,
            "parallel_tool_calls": body["parallel_tool_calls"] is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body["reasoning"] or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": body["temperature"],
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body["tool_choice"] or "auto",
            "tools": body["tools"] or [],
            "top_p": body["top_p"],
            "truncation": "disabled",
            "usage": None if self._answers[0].finished is None else self._used(),
            "metadata": {},
        }

    def _used(self) -> dict[str, Any]:
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": used["total_tokens"],
            "buddy": used["buddy"],
        }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
