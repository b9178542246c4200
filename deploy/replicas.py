"""Several servers behind one address: Ray Serve keeps them, and budgets say who answers what.

    pip install "ray[serve]"            # in an environment of its own, which needs no Buddy
    python deploy/replicas.py up deploy/buddy.toml
    python deploy/replicas.py restart   # one server after another, with no request lost

A server is `buddy serve`, `vllm serve` with the plugin `buddy-vllm`, or anything else that speaks
OpenAI's API. `Server` is an actor that starts one, watches it and ends it. `Front` is the address:
it reads how many blocks a request asks for, chooses a server by that, and passes bytes through. It
refuses nothing and changes nothing: what is wrong with a request, its server says.
"""

import argparse
import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

APP = "buddy"
_WATCH_S = 0.5
"""Seconds between two looks at whether a server is ready."""
_ASK_S = 5.0
"""Seconds that a server may take to say so."""
_OPEN_REQUESTS = 10_000
"""That Ray Serve lets through to `Front` at once: how many is enough, the servers say (429)."""
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of one connection, not of the message (RFC 9110, 7.6.1)."""
_WRITTEN = re.compile(
    r"""\s*(?:
        (?P<count> \d{1,9} ) [ ]* blocks?
      | (?P<number> \d{1,9} (?:\.\d{0,30})? | \.\d{1,30} ) (?P<percent> %? )
    )\s*""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
_MEAN = re.compile(r"\s*mean\s*:(.*)", re.ASCII | re.IGNORECASE | re.DOTALL)
_PHASES = re.compile(
    r"\s*(?:prompt|(prefill))\s*:\s*(?P<prompt>[^,]+?)\s*,"
    r"(?:\s*think\s*:\s*(?P<think>[^,]+?)\s*,)?"
    r"\s*(?(1)decode|answer)\s*:\s*(?P<answer>[^,]+?)\s*",
    re.ASCII,
)
_PARTS = ("prompt", "prefill", "think", "answer", "decode", "mean")
"""Keys of an object that name blocks."""
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One server, and what it is for."""

    name: str
    budget: float | str
    """It answers requests of up to so many blocks that no smaller class takes, as clients write
    budgets. Replicas of one budget share its requests."""
    port: int
    """Where it listens."""
    command: tuple[str, ...]
    """Command that starts it; `{host}` and `{port}` are filled in."""
    num_cpus: float = 1
    """Cores among Ray's resources; Ray sets `OMP_NUM_THREADS` to it."""
    num_gpus: float = 0
    """GPUs among Ray's resources; the server sees these alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All of a deployment.

    Raises:
        ValueError: There is no replica, two have one name, or a budget cannot be read.
    """

    replica: tuple[Replica, ...]
    num_blocks: int
    """Blocks of the model."""
    host: str = "127.0.0.1"
    """Where `Front` listens."""
    port: int = 8000
    server_host: str = "127.0.0.1"
    """Where servers listen; `0.0.0.0` where they are on several machines (give them keys then)."""
    ready: str = "/ready"
    """Path that is 200 where a server takes requests; vLLM's is `/health`."""
    start_s: float = 600.0
    """Seconds that a server may take to become ready."""
    drain_s: float = 60.0
    """Seconds that its answers may take to end, before it is restarted."""
    classes: dict[str, int] = field(init=False, repr=False)
    """Most blocks that the requests of each replica ask for."""

    def __post_init__(self) -> None:
        found = {
            replica.name: blocks_of(replica.budget, self.num_blocks) for replica in self.replica
        }
        if not found or len(found) < len(self.replica):
            raise ValueError(
                f"a deployment needs replicas with a name each, got {[*found] or 'none'}: "
                "write [[replica]] and another name for each"
            )
        for name, blocks in found.items():
            if blocks is None:
                raise ValueError(
                    f"the budget of replica {name} cannot be read: expected such as 0.6 or "
                    '"18 blocks"'
                )
        object.__setattr__(self, "classes", found)

    @classmethod
    def read(cls, path: Path) -> "Config":
        """Read a TOML file whose keys are the fields.

        Raises:
            ValueError: It is no TOML, a key is unknown or missing, or see `Config`.
        """
        read = tomllib.loads(path.read_text())
        replicas = tuple(
            _made(Replica, {**table, "command": tuple(table.get("command", ()))})
            for table in read.pop("replica", ())
        )
        return _made(cls, {**read, "replica": replicas})


def _made(kind: type[_Kind], values: dict[str, Any]) -> _Kind:
    known = {field.name for field in fields(kind) if field.init}  # type: ignore[arg-type]
    if unknown := values.keys() - known:
        raise ValueError(
            f"unknown key {sorted(unknown)[0]!r}: expected some of {', '.join(sorted(known))}"
        )
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__.lower()} is not complete: {error}") from error


def blocks_of(budget: Any, num_blocks: int) -> int | None:
    """Blocks of one budget as a client writes it; None where that does not say.

    A share is rounded as Buddy rounds it: a half goes down.
    """
    if isinstance(budget, str):
        match = _WRITTEN.fullmatch(budget)
        if match is None:
            return None
        if match["count"]:
            return int(match["count"])
        share = Fraction(match["number"]) / (100 if match["percent"] else 1)
    elif isinstance(budget, int | float) and not isinstance(budget, bool):
        if not 0 < budget <= 1:  # NaN too
            return None
        share = Fraction(str(budget))
    else:
        return None
    return math.ceil(share * num_blocks - Fraction(1, 2)) if 0 < share <= 1 else None


def asked_blocks(body: Any, num_blocks: int) -> int | None:
    """The most blocks that a token of a request may run, or the mean that it names.

    It reads the field `budget` (of several parts the largest, such as of `prompt`, `think` and
    `answer`; or `max`), the `budget` in `vllm_xargs`, and what stands after `@` in the model's
    name, in that order. None where these do not say.
    """
    if not isinstance(body, Mapping):
        return None
    budget = body.get("budget")
    if budget is None and isinstance(inner := body.get("vllm_xargs"), Mapping):
        budget = inner.get("budget")
    if budget is None:
        _, at, budget = str(body.get("model", "")).rpartition("@")
        budget = budget if at else None
    if isinstance(budget, Mapping):
        parts = [budget[name] for name in _PARTS if name in budget] or [budget.get("max")]
    elif isinstance(budget, str):
        phased = _PHASES.fullmatch(budget)
        *others, answer = phased.group("prompt", "think", "answer") if phased else (budget,)
        mean = _MEAN.fullmatch(answer)
        parts = [*filter(None, others), mean[1] if mean else answer]
    else:
        parts = [budget]
    read = [blocks_of(part, num_blocks) for part in parts]
    return None if None in read else max(blocks for blocks in read if blocks is not None)


class Server:
    """Keeps one server's process: starts it, says whether it is well, restarts and ends it."""

    async def __init__(self, config: Config, replica: Replica) -> None:  # type: ignore[misc]
        # Ray Serve awaits it.
        self._config, self._replica = config, replica
        self._is_restarting = False
        await self._start()

    async def url(self) -> str:
        """Where it answers."""
        host = self._config.server_host
        if host in ("0.0.0.0", "::"):
            import ray

            host = ray.util.get_node_ip_address()
        return f"http://{host}:{self._replica.port}"

    async def check_health(self) -> None:
        """Ray Serve asks this; whoever fails three times is started anew, on any machine.

        Raises:
            RuntimeError: The process has ended or is not ready, and nobody restarts it.
        """
        if not self._is_restarting and not await self._is_ready():
            raise RuntimeError(f"server {self._replica.name} does not take requests")

    async def restart(self) -> None:
        """End the process, which lets its answers finish, and start another."""
        self._is_restarting = True
        try:
            await asyncio.to_thread(self._stop)
            await self._start()
        finally:
            self._is_restarting = False

    def __del__(self) -> None:
        self._stop()  # Ray Serve deletes an actor's object before it ends the actor

    async def _start(self) -> None:
        host, port = self._config.server_host, str(self._replica.port)
        command = [
            part.replace("{host}", host).replace("{port}", port) for part in self._replica.command
        ]
        if program := shutil.which("setpriv"):  # on Linux it ends with this actor, killed or not
            command = [program, "--pdeathsig", "TERM", "--", *command]
        # From the actor's own thread, which lives as long as the actor: the signal is the thread's.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        end = time.monotonic() + self._config.start_s
        while not await self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self._stop()
                raise RuntimeError(
                    f"server {self._replica.name} is not ready, and its process ended with "
                    f"{self._process.returncode}: see its log; its command is {command}"
                )
            await asyncio.sleep(_WATCH_S)

    async def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            self._stop()
            return False
        async with _session() as session:
            return await _answers(session, await self.url() + self._config.ready)

    def _stop(self) -> None:
        """End the server, and what it has started: that may outlive it, and hold a GPU."""
        process = getattr(self, "_process", None)
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._config.drain_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(slots=True)
class Place:
    """What `Front` knows of a server."""

    name: str
    blocks: int
    """Blocks of its class."""
    url: str | None = None
    is_ready: bool = False
    is_out: bool = False
    """It is being restarted."""
    in_flight: int = 0
    """Requests that were given to it and have not been answered to their end."""


def ranked(places: Sequence[Place], blocks: int | None) -> list[Place]:
    """Servers that may answer a request, the best first.

    Its own class comes first: the smallest that has room for its blocks, or the deepest where the
    request does not say. The nearest deeper ones follow, then shallower ones. Within a class the
    one with the fewest requests in flight comes first.
    """
    deepest = max((place.blocks for place in places), default=0)
    wanted = deepest if blocks is None else min(blocks, deepest)

    def order(place: Place) -> tuple[bool, int, int]:
        return place.blocks < wanted, abs(place.blocks - wanted), place.in_flight

    return sorted((place for place in places if place.is_ready and not place.is_out), key=order)


class Front:
    """The one address: chooses a server for each request, and passes bytes both ways.

    Args:
        config: Of the deployment.
        servers: Handles of the deployments of `Server`, by name.
    """

    async def __init__(self, config: Config, servers: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._config, self._servers = config, servers
        self._places = [Place(name, blocks) for name, blocks in config.classes.items()]
        self._session, self._restarting = _session(), asyncio.Lock()
        self._watches = [asyncio.create_task(self._watch(place)) for place in self._places]

    async def __call__(self, request: Any) -> Any:
        """Answer an HTTP request with what a server answers to it.

        A server that cannot be reached, that ends before it has answered, that says 503, or 500
        while it ends, has served nothing: the next one is asked. Any other answer is passed on.
        """
        from starlette.responses import JSONResponse, StreamingResponse

        content = await request.body()
        for place in ranked(self._places, asked_blocks(_read(content), self._config.num_blocks)):
            place.in_flight += 1
            try:
                answer = await self._ask(place, request, content)
            except BaseException:
                place.in_flight -= 1
                raise
            if answer is None:
                place.in_flight -= 1
                continue
            made = StreamingResponse(self._relay(place, answer), answer.status)
            made.raw_headers = [
                (name, value)
                for name, value in answer.raw_headers
                if name.lower().decode() not in _HOP_BY_HOP
            ]
            made.raw_headers.append((b"x-buddy-replica", place.name.encode()))
            return made
        error = {"message": "no server takes requests now: try again", "type": "server_error"}
        return JSONResponse({"error": error}, 503, {"Retry-After": "5"})

    async def restart(self) -> list[str]:
        """Restart the servers one after another; each first answers what it was given.

        Returns:
            Their names.

        Raises:
            RuntimeError: No other server is ready to answer meanwhile, or one does not come back.
        """
        async with self._restarting:
            for place in self._places:
                await self._restart(place)
        return [place.name for place in self._places]

    async def _restart(self, place: Place) -> None:
        if not any(other.is_ready for other in self._places if other is not place):
            raise RuntimeError(
                f"server {place.name} is not restarted: no other one would answer meanwhile"
            )
        place.is_out = True
        try:
            end = time.monotonic() + self._config.drain_s
            while place.in_flight and time.monotonic() < end:
                await asyncio.sleep(0.05)
            await self._servers[place.name].restart.remote()
            place.is_ready = await self._look(place)
        finally:
            place.is_out = False

    async def _ask(self, place: Place, request: Any, content: bytes) -> Any:
        """The beginning of a server's answer, or None where it served nothing."""
        import aiohttp

        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.headers.raw
            if name.decode("latin-1").lower() not in _HOP_BY_HOP | {"content-length"}
        ]
        try:
            answer = await self._session.request(
                request.method, f"{place.url}{path}", headers=headers, data=content or None
            )
        except aiohttp.ClientConnectionError:
            place.is_ready = False  # until the next look
            return None
        if answer.status == 503 or (answer.status == 500 and not await self._stays(place)):
            answer.close()
            return None
        return answer

    async def _stays(self, place: Place) -> bool:
        """Whether a server that has failed is there still: one that is being ended may say 500."""
        await asyncio.sleep(_WATCH_S)
        place.is_ready = await _answers(self._session, f"{place.url}{self._config.ready}")
        return place.is_ready

    async def _relay(self, place: Place, answer: Any) -> AsyncIterator[bytes]:
        """Each piece as it comes; a client that leaves ends the server's answer too."""
        try:
            async for piece in answer.content.iter_any():
                yield piece
        finally:
            place.in_flight -= 1
            answer.close()

    async def _watch(self, place: Place) -> None:
        while True:
            place.is_ready = await self._look(place)
            await asyncio.sleep(_WATCH_S)

    async def _look(self, place: Place) -> bool:
        """Whether a server is ready, wherever it is now."""
        if place.url is not None and await _answers(self._session, place.url + self._config.ready):
            return True
        with suppress(Exception):  # its actor is gone or is being made: there is no address
            url = str(await asyncio.wait_for(self._servers[place.name].url.remote(), _ASK_S))
            place.url = url
            return await _answers(self._session, url + self._config.ready)
        return False


def _read(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):  # its server says what is wrong
        return None


def _session() -> Any:
    """A client without limits of its own: answers may be many, and long.

    Each request has a connection of its own. One that is kept may be closed by the server at the
    moment of its next use, which could not be told from a server that is gone.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ASK_S),
        auto_decompress=False,
    )


async def _answers(session: Any, url: str) -> bool:
    """Whether a path is 200, soon."""
    import aiohttp

    try:
        limit = aiohttp.ClientTimeout(total=_ASK_S)
        async with session.get(url, timeout=limit) as answer:
            return bool(answer.status == 200)
    except (aiohttp.ClientError, TimeoutError):
        return False


def build(config: Config) -> Any:
    """The application of Ray Serve: a deployment for each server, and `Front` before them."""
    from ray import serve

    servers = {
        replica.name: serve.deployment(Server)
        .options(
            name=f"server-{replica.name}",
            ray_actor_options={"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus},
            health_check_period_s=2,
            health_check_timeout_s=4 * _ASK_S,
            graceful_shutdown_timeout_s=config.drain_s + _ASK_S,
            max_constructor_retry_count=20,
        )
        .bind(config, replica)
        for replica in config.replica
    }
    front = serve.deployment(Front).options(
        name="front",
        num_replicas=1,  # it counts what each server has in flight
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_OPEN_REQUESTS,
        graceful_shutdown_timeout_s=config.drain_s,
    )
    return front.bind(config, servers)


def up(path: Path) -> None:
    """Start all, say where, and end it with Ctrl-C or SIGTERM."""
    import ray
    from ray import serve

    config = Config.read(path)
    ray.init()  # a cluster that RAY_ADDRESS names, or one of this machine
    serve.start(http_options={"host": config.host, "port": config.port, "request_timeout_s": None})
    # The servers log requests themselves.
    serve.run(build(config), name=APP, logging_config={"enable_access_log": False})
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has set handlers of its own
        signal.signal(number, lambda *_: ended.set())
    sys.stdout.write(f"address: http://{config.host}:{config.port}\n")
    sys.stdout.flush()
    ended.wait()
    serve.shutdown()
    ray.shutdown()


def restart() -> None:
    """Restart the servers of the deployment that runs."""
    import ray
    from ray import serve

    ray.init(address="auto")
    names = serve.get_app_handle(APP).restart.remote().result()
    sys.stdout.write(f"restarted: {', '.join(names)}\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start the servers and the address before them")
    start.add_argument("config", type=Path)
    commands.add_parser("restart", help="restart the servers, one after another")
    args = parser.parse_args()
    try:
        up(args.config) if args.command == "up" else restart()
    except (OSError, ValueError) as error:
        sys.exit(f"replicas: {error}")


if __name__ == "__main__":
    main()
