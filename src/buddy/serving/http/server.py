"""Listening, and ending well: SIGTERM lets answers finish, for a while, and the process exits 0."""

import asyncio
import errno
import gc
import ipaddress
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Final

import uvicorn
from starlette.types import ASGIApp

from buddy.errors import ServingError
from buddy.serving.http.connections import Connection
from buddy.serving.http.service import Service
from buddy.settings import Range, check_ranges

_BACKLOG: Final = 2048
_AT_ONCE: Final = 64
"""Connections that asyncio accepts before it makes any: it logs each for which there is no file."""
_CONNECTIONS: Final = 256
"""Connections beside those that wait for answers."""
_OTHER_FILES: Final = 256
"""Files that may be open beside them: of the process, and of connections just made or closed."""
_TICK_S: Final = 0.05
_WATCH_S: Final = 0.5
"""How often it is asked whether the engine has failed."""
_LAST_WORDS_S: Final = 2
"""Time for answers that are made to be sent, once nothing is under way."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where the server listens.

    Raises:
        ServingError: The port is none.
    """

    host: str
    port: Annotated[int, Range(0, 65535)]
    """0 = any that is free."""

    def __post_init__(self) -> None:
        check_ranges(self, ServingError)

    @property
    def is_loopback(self) -> bool:
        """Whether this machine alone can reach it."""
        if self.host == "localhost":
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


def check_reach(address: Address, *, has_keys: bool) -> None:
    """Refuse to serve others without keys.

    Raises:
        ServingError: The address can be reached from elsewhere, and there are no keys.
    """
    if not address.is_loopback and not has_keys:
        raise ServingError(
            f"{address.host} may be reached by others, and there are no keys: give "
            "--api-key-file, or keep to --host 127.0.0.1"
        )


def listen(address: Address) -> socket.socket:
    """Take an address; nothing is answered there yet.

    Raises:
        ServingError: It is in use, may not be used, or is none of this machine.
    """
    try:
        addresses = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = addresses[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ServingError(f"host {address.host} cannot be found: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(0)  # else two servers could bind, and the second fail much later
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServingError(
                f"port {address.port} of {address.host} is in use: stop what listens there, or "
                "give another --port"
            ) from error
        raise ServingError(
            f"port {address.port} of {address.host} cannot be used: {error.strerror or error}"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """How a browser on this machine finds it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it: uvicorn's own end kills the process by them again."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def most_connections(answers: int | None) -> int:
    """Connections that may be open at once: those whose answers are made, as many more, and some.

    A limit on open files is raised where it may be.

    Args:
        answers: That the engine holds at once; None = any number.

    Raises:
        ServingError: This process may not open so many files.
    """
    most = _CONNECTIONS + 2 * (_CONNECTIONS if answers is None else answers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + _OTHER_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and hard < needed:
        raise ServingError(
            f"a server that holds {answers} answers at once needs {needed} open files, and this "
            f"process may have {hard}: raise the limit (ulimit -n), or lower --max-rows and "
            "--max-queue"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return most


def make_server(app: ASGIApp, *, connections: int | None = None) -> uvicorn.Server:
    """A server of one process; it logs through `logging` as that is set up.

    Args:
        app: Of `make_app`.
        connections: That may be open at once; None = any number.
    """
    logging.getLogger("uvicorn.access").disabled = True  # it would write whole URLs
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            http=Connection,
            backlog=_AT_ONCE,
            limit_concurrency=connections,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
    )


def serve(app: ASGIApp, service: Service, listener: socket.socket, *, drain_s: float) -> bool:
    """Answer until SIGTERM or Ctrl-C, then let answers finish.

    While it drains, the server says so: `/ready` and new requests get 503. A second signal ends it
    at once. An engine that has failed ends it too, for whoever starts it anew.

    Args:
        app: Of `make_app`.
        service: What the app was made of.
        listener: Of `listen`.
        drain_s: For answers that are under way; those that take longer are cut off.

    Returns:
        Whether the engine was whole to the end.
    """
    gc.collect()
    gc.freeze()  # else a large body has Python look through all that was loaded, for a second
    return asyncio.run(_serve(app, service, listener, drain_s))


async def _serve(app: ASGIApp, service: Service, listener: socket.socket, drain_s: float) -> bool:
    connections = most_connections(service.engine.facts.most_answers)
    server, stopping = make_server(app, connections=connections), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            server.should_exit = server.force_exit = True
        stopping.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    draining = asyncio.create_task(_drain(server, service, stopping, drain_s))
    try:
        await asyncio.wait({answering, draining}, return_when=asyncio.FIRST_COMPLETED)
        await answering
        return service.engine.state != "failed"
    finally:
        draining.cancel()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
        service.engine.close(float(_LAST_WORDS_S))


async def _drain(
    server: uvicorn.Server, service: Service, stopping: asyncio.Event, drain_s: float
) -> None:
    """End the server once it is told to, or its engine has failed."""
    while not stopping.is_set() and service.engine.state != "failed":
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _WATCH_S)
    if service.engine.state == "failed":
        drain_s = _LAST_WORDS_S
    service.engine.drain()
    try:
        async with asyncio.timeout(drain_s):
            while service.under_way:
                await asyncio.sleep(_TICK_S)
    except TimeoutError:
        for answers in list(service.under_way):
            answers.give_up("the server ended before the answer did")
    server.should_exit = True
