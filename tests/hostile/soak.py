"""Clients of every kind at more than a server can do: `python -m tests.hostile.soak URL PID S`.

First sixteen clients keep it busy. Then requests come at random times, 1.2 times as often as the
last ten seconds have shown that it answers. What a contract ran is worked out from the request and
the tokens that came, and compared with what the server says of it.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil

OVERLOAD = 1.2
"""Requests that come, of those that can be answered."""
_WINDOW_S = 10
"""Time over which it is counted how many are answered."""
_SAMPLES = 40
"""Looks at the server's memory."""
_LONGEST = 1500
"""Tokens of the longest prompts; a token is a byte."""
SIZE = {
    "type": "object",
    "properties": {"a": {"enum": [0, 7, 42]}},
    "required": ["a"],
    "additionalProperties": False,
}


@dataclass
class Asked:
    """A request, and how its client behaves.

    Attributes:
        kind: A word for it.
        body: What is sent.
        path: Where to.
        contract: Blocks of prompt, thinking and answer, if they are fixed.
        is_slow: The client reads now and then.
        leaves: Pieces of the answer after which it leaves; None = it stays.
    """

    kind: str
    body: dict
    path: str = "chat/completions"
    contract: tuple[int, int, int] | None = None
    is_slow: bool = False
    leaves: int | None = None


@dataclass
class Answer:
    """What came of a request."""

    text: str = ""
    calls: list = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    reason: str | None = None
    usage: dict | None = None

    def take(self, body):
        """Add a chunk of a stream, or a whole answer."""
        if "error" in body:
            raise ValueError(body["error"]["message"])
        self.usage = body.get("usage") or self.usage
        self.runs += (body.get("buddy") or {}).get("runs", [])
        for choice in body["choices"]:
            said = choice.get("delta") or choice.get("message") or choice
            self.text += said.get("content") or said.get("text") or ""
            self.calls += said.get("tool_calls") or []
            self.tokens += [e["token"] for e in (choice.get("logprobs") or {}).get("content") or []]
            self.reason = choice["finish_reason"] or self.reason


def check(asked, answer):
    """Compare an answer with what was asked.

    Raises:
        ValueError: It is not whole, not what it must be, or ran other blocks than it might.
    """
    _expect("an end", answer.reason in ("stop", "length", "tool_calls"), answer)
    if answer.reason != "length" and asked.kind == "schema":
        _expect("an answer of the schema", json.loads(answer.text)["a"] in (0, 7, 42), answer)
    if answer.reason != "length" and asked.kind == "tools":
        arguments = [json.loads(call["function"]["arguments"]) for call in answer.calls]
        _expect("valid calls", arguments and all(a["a"] in (0, 7, 42) for a in arguments), answer)
    if asked.contract is None:
        return
    prompt, think, rest = asked.contract
    used = answer.usage
    made, fed = used["completion_tokens"], used["prompt_tokens"]
    fed -= used["prompt_tokens_details"]["cached_tokens"]
    depths = [rest] * (made - 1)
    if asked.kind == "phases":
        is_open, depths = True, []
        for token in answer.tokens[:-1]:
            is_open = token == "<think>" or (is_open and token != "</think>")
            depths.append(think if is_open else rest)
        _expect("a token's name for each token", len(answer.tokens) == made, answer)
    spent = prompt * fed + sum(depths)
    _expect(f"{spent} blocks", used["buddy"]["blocks_executed"] == spent, answer)
    if asked.body.get("stream"):
        ran, may = [run.count("1") for run in answer.runs], [prompt, *depths]
        told = may[:-1] if answer.reason == "stop" else may  # what ends it is in no chunk
        _expect(f"runs of {told}", ran == told, answer)


def _expect(what, is_so, answer):
    if not is_so:
        raise ValueError(f"expected {what}, got {answer}")


def draw_request(draw):
    """A request of any kind."""
    return draw.choice(KINDS)(draw)


def _chat(draw, kind, *, size=None, contract=None, behaves=None, **more):
    """A conversation of one message, of random letters."""
    size = size or draw.randint(1, 40)
    text = "".join(draw.choices("abcdefgh ", k=size))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": draw.randint(2, 48)}
    if draw.random() < 0.2:
        more["seed"] = draw.randrange(99)
    if draw.random() < 0.2:
        more["drafts"] = "ngram"
    return Asked(kind, body | more, contract=contract, **behaves or {})


def _streamed(**more):
    return {"stream": True, "stream_options": {"include_usage": True, "include_depth": True}} | more


def _blocks(draw):
    return draw.randint(3, 6)


def _fixed(draw):
    blocks = _blocks(draw)
    return _chat(draw, "fixed", contract=(blocks,) * 3, budget=f"{blocks} blocks")


def _by_phase(draw, kind, **more):
    prompt, answer = _blocks(draw), _blocks(draw)
    budget = {"prompt": f"{prompt} blocks", "answer": f"{answer} blocks"}
    return _chat(
        draw, kind, contract=(prompt, answer, answer), budget=budget, **_streamed(), **more
    )


def _two_phases(draw):
    return _by_phase(draw, "streamed")


def _long(draw):
    return _by_phase(draw, "long", size=draw.randint(300, _LONGEST))


def _slow(draw):
    return _by_phase(draw, "slow", behaves={"is_slow": True})


def _cut(draw):
    return _by_phase(draw, "cut", behaves={"leaves": draw.randint(0, 20)})


def _phases(draw):
    phases = tuple(_blocks(draw) for _ in range(3))
    names = zip(("prompt", "think", "answer"), phases, strict=True)
    return _chat(
        draw,
        "phases",
        contract=phases,
        budget={name: f"{blocks} blocks" for name, blocks in names},
        thinking_tokens=draw.randint(0, 20),
        chat_template_kwargs={"enable_thinking": True},
        logprobs=True,
        **_streamed(),
    )


def _deadline(draw):
    return _chat(draw, "deadline", budget={"ms_per_token": draw.choice((200, 1000))}, stream=True)


def _elastic(draw):
    return _chat(draw, "elastic", n=draw.randint(1, 3), temperature=draw.choice((0, 1)))


def _tools(draw):
    tool = {"type": "function", "function": {"name": "size", "parameters": SIZE, "strict": True}}
    choice = {"tool_choice": "required", "parallel_tool_calls": False}
    asked = _chat(draw, "tools", tools=[tool], **choice, stream=draw.random() < 0.5)
    asked.body["max_tokens"] = 200
    return asked


def _schema(draw):
    wanted = {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}}
    asked = _chat(draw, "schema", response_format=wanted)
    asked.body["max_tokens"] = 60
    return asked


def _scored(draw):
    body = {"prompt": "abc" * draw.randint(1, 30), "echo": True, "logprobs": 1, "max_tokens": 0}
    return Asked("scored", body, "completions")


KINDS = (
    *(_fixed, _two_phases, _long, _slow, _cut, _phases),
    *(_deadline, _elastic, _tools, _schema, _scored),
)


@dataclass
class Figures:
    """What a soak has shown; memory in megabytes."""

    answered: Counter = field(default_factory=Counter)
    contracts: int = 0
    refused: int = 0
    left: int = 0
    lost: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    capacity_rps: float = 0.0
    asked: int = 0

    @property
    def ended(self):
        """Requests that took their share of the server."""
        return self.answered.total() + self.left


class Soak:
    """Asks a server until a time is over.

    Args:
        url: Of the server.
        pid: Of its process.
        seconds: That requests come for, after those in which it is seen how many are answered.
    """

    def __init__(self, url, pid, seconds):
        self.url, self.process, self.seconds = url, psutil.Process(pid), seconds
        self.draw, self.figures = random.Random(0), Figures()

    async def run(self):
        """Ask, and return what was seen."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as self.client:
            window_s = min(_WINDOW_S, self.seconds / 4)
            busy = [asyncio.create_task(self._busy(time.monotonic() + window_s)) for _ in range(16)]
            await asyncio.sleep(window_s)
            self.figures.capacity_rps = max(1, self.figures.ended) / window_s
            watching = asyncio.create_task(self._watch())
            await self._come(window_s)
            watching.cancel()
            await asyncio.gather(*busy)
        return self.figures

    async def _busy(self, end):
        while time.monotonic() < end:
            await self._ask(draw_request(self.draw))

    async def _come(self, window_s):
        """Ask at random times, as often as goes with what the last window has shown."""
        under_way, at = set(), time.monotonic()
        end, since, before = at + self.seconds, at, self.figures.ended
        while (at := at + self.draw.expovariate(OVERLOAD * self.figures.capacity_rps)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            task = asyncio.create_task(self._ask(draw_request(self.draw)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            if at - since >= window_s:
                self.figures.capacity_rps = max(1, self.figures.ended - before) / (at - since)
                since, before = at, self.figures.ended
        await asyncio.gather(*under_way)

    async def _watch(self):
        while True:
            self.figures.memory_mb.append(self.process.memory_info().rss / 1e6)
            await asyncio.sleep(self.seconds / _SAMPLES)

    async def _ask(self, asked):
        self.figures.asked += 1
        url = f"{self.url}/v1/{asked.path}"
        try:
            async with self.client.stream("POST", url, json=asked.body) as reply:
                if reply.status_code != 200:
                    self._refused(reply, await reply.aread())
                elif asked.body.get("stream"):
                    await self._read(asked, reply)
                else:
                    answer = Answer()
                    answer.take(json.loads(await reply.aread()))
                    self._check(asked, answer)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            self.figures.lost.append(f"{asked}: {error!r}")

    async def _read(self, asked, reply):
        answer, pieces, is_whole = Answer(), 0, False
        async for line in reply.aiter_lines():
            if asked.leaves is not None and pieces >= asked.leaves:
                self.figures.left += 1
                return
            if line == "data: [DONE]":
                is_whole = True
            elif line.startswith("data: "):
                pieces += 1
                answer.take(json.loads(line[6:]))
            if asked.is_slow and pieces % 8 == 0:
                await asyncio.sleep(0.2)
        if not is_whole:
            raise ValueError("the stream ended before it was whole")
        self._check(asked, answer)

    def _refused(self, reply, content):
        if reply.status_code != 429 or not 1 <= int(reply.headers["retry-after"]) <= 60:
            raise ValueError(f"{reply.status_code} {content!r}")
        self.figures.refused += 1

    def _check(self, asked, answer):
        check(asked, answer)
        self.figures.answered[asked.kind] += 1
        self.figures.contracts += asked.contract is not None


if __name__ == "__main__":
    figures = asyncio.run(Soak(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])).run())
    sys.stdout.write(json.dumps(vars(figures)) + "\n")
