"""Hostile and honest load on a server: `python -m tests.hostile.load URL PID SECONDS`.

`python benchmarks/serving.py hostile` starts a server for it, and writes a record.
"""

import itertools
import json
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException

import psutil

_HEAD = "POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_HEAD += "Content-Length: {length}\r\n\r\n"


def _post(path, body):
    return _HEAD.format(path=path, length=len(body)).encode() + body


def _asked(**fields):
    return json.dumps(fields).encode()


FREEZING = [
    _post("chat/completions", b'{"messages": [' + b"5," * 900_000 + b'5], "max_tokens": 1}'),
    _post("completions", _asked(prompt="1" * 1_990_000)),
    _post("completions", _asked(prompt=" " * 400_000 + "1" * 1_590_000)),
    _post("completions", b'{"prompt": [' + b"[]," * 600_000 + b"[]]}"),
    _post("chat/completions", b'{"messages": [], "x": {%s}}' % (b'"a":[],' * 250_000 + b'"b":1')),
    _post("completions", _asked(prompt=[5], n=16, logprobs=20, max_tokens=40)),
    _post("completions", _asked(prompt="1" * 60_000)),
]
"""Requests that take long to read, to refuse or to answer."""
IDLE = [
    b"",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: ",
    _post("completions", b"x" * 9)[:-3],
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n" + b"x" * 9000,
    _post("completions", b"x" * 1_000_000)[:300_000],
]
"""What is sent on a connection that then sends nothing more."""
_SAMPLE_S = 0.2
"""Time between two looks at the server's memory."""


@dataclass
class Figures:
    """What a load has shown."""

    lost: list[str] = field(default_factory=list)
    honest_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    hostile: int = 0

    def percentile(self, share, times):
        """The time that so many of these are below."""
        return sorted(times)[min(len(times) - 1, int(share * len(times)))]


class Load:
    """Threads that ask a server until a time is over.

    Args:
        url: Of the server.
        pid: Of its process.
        seconds: That it lasts.
        clients: Honest ones.
        connections: Idle ones, of two clients each.
    """

    def __init__(self, url, pid, seconds, *, clients=20, connections=600):
        host, _, port = url.removeprefix("http://").partition(":")
        self.address = host, int(port)
        self.process, self.seconds = psutil.Process(pid), seconds
        self.clients, self.connections = clients, connections
        self.figures = Figures()

    def run(self):
        """Ask, and return what was seen."""
        self.held = [[self._connect() for _ in range(self.connections)] for _ in range(2)]
        self.end = time.monotonic() + self.seconds
        works = [self._honest] * self.clients + [self._health, self._freeze, self._freeze]
        works += [self._hold, self._hold]
        threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        while self._goes_on:
            self.figures.memory_mb.append(self.process.memory_info().rss / 1e6)
            time.sleep(_SAMPLE_S)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.figures

    @property
    def _goes_on(self):
        return time.monotonic() < self.end

    def _honest(self):
        body = _asked(prompt="hello, you", max_tokens=4, temperature=0)
        while self._goes_on:
            if (seconds := self._ask("POST", "/v1/completions", body)) is not None:
                self.figures.honest_s.append(seconds)
            time.sleep(0.05)

    def _health(self):
        while self._goes_on:
            if (seconds := self._ask("GET", "/health")) is not None:
                self.figures.health_s.append(seconds)
            time.sleep(0.02)

    def _ask(self, method, path, body=None):
        """How long an answer takes; None where it is none."""
        began, made = time.monotonic(), HTTPConnection(*self.address, timeout=60)
        try:
            made.request(method, path, body, {"Content-Type": "application/json"})
            reply = made.getresponse()
            if reply.status != 200:
                self.figures.lost.append(f"{path}: {reply.status} {reply.read()!r}")
                return None
            reply.read()
        except (OSError, HTTPException) as error:
            self.figures.lost.append(f"{path}: {error!r}")
            return None
        finally:
            made.close()
        return time.monotonic() - began

    def _connect(self):
        made = socket.create_connection(self.address, timeout=10)
        self.figures.hostile += 1
        return made

    def _freeze(self):
        """Send what takes long; one of two waits for the answer and the other leaves."""
        for number, content in enumerate(itertools.cycle(FREEZING)):
            if not self._goes_on:
                return
            try:
                with self._connect() as made:
                    made.sendall(content)
                    if number % 2:
                        made.recv(1000)
            except OSError:
                pass
            time.sleep(0.1)

    def _hold(self):
        """Open connections, hold as many as may be, and drip headers on some."""
        held = self.held.pop()
        for content in itertools.cycle(IDLE):
            if not self._goes_on:
                break
            try:
                held.append(self._connect())
                held[-1].sendall(content)
                if len(held) > 5:
                    held[-5].sendall(b"y")
            except OSError:
                pass
            if len(held) > self.connections:
                held.pop(0).close()
            time.sleep(0.02)
        for made in held:
            made.close()


if __name__ == "__main__":
    figures = Load(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])).run()
    memory, honest, health = figures.memory_mb, figures.honest_s, figures.health_s
    shown = {
        "asked": len(honest) + sum(who.startswith("/v1") for who in figures.lost),
        "answered": len(honest),
        "lost": figures.lost,
        "hostile": figures.hostile,
        "honest_s": [figures.percentile(share, honest) for share in (0.5, 0.99, 1)],
        "healths": len(health),
        "health_s": [figures.percentile(share, health) for share in (0.5, 0.99, 1)],
        "memory_mb": [memory[0], max(memory), memory[-1]],
        "memory_mb_each_10_s": memory[:: round(10 / _SAMPLE_S)],
    }
    sys.stdout.write(json.dumps(shown) + "\n")
