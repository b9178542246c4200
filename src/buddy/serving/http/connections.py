"""Connections: a client that does not say what it wants gives way to those that do."""

import asyncio
from heapq import nsmallest
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_S: Final = 10.0
"""Time for the head of a request to arrive, however it is dripped."""
_AHEAD: Final = 2**16
"""Bytes of requests that may wait for the answer to an earlier one while the client is watched."""
_SHARE: Final = 16
"""One in so many connections is closed where there are too many, those first that wait longest."""


class Connection(H11Protocol):
    """A connection of uvicorn's, bounded in what it may hold back.

    uvicorn closes a connection that is silent after an answer. It lets one wait for ever before its
    first request or within a head, and with `limit_concurrency` refuses every request while idle
    connections are too many. Here these are closed instead.
    """

    _late: asyncio.TimerHandle | None = None
    _since = 0.0
    """When the client's turn began, as far as it is the client's turn."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, and make room where there is none."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._late = self.loop.call_later(_HEAD_S, transport.abort)
        most, self.limit_concurrency = self.limit_concurrency, None
        if most is None or len(self.connections) < most:
            return
        there = [c for c in self.connections if not c.transport.is_closing()]
        if len(there) >= most:
            waiting = (c for c in there if isinstance(c, Connection) and c._is_waiting)
            for connection in nsmallest(max(1, most // _SHARE), waiting, key=lambda c: c._since):
                connection.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take what came; a head that is not whole is waited for until its time is over.

        uvicorn reads nothing after a request that came before the answer to another, and so would
        not hear of a client that leaves.
        """
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _AHEAD:
            self.flow.resume_reading()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()
        elif self._late is None:
            self._late = self.loop.call_later(_HEAD_S, self.transport.abort)

    def on_response_complete(self) -> None:
        """Begin the client's turn."""
        self._since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Let an answer be sent; a request that is not whole gets none."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_clock()
        super().connection_lost(exc)

    @property
    def _is_waiting(self) -> bool:
        """Whether the client has to go on: say what it wants, or take what it asked for."""
        cycle = self.cycle
        is_asking = cycle is None or cycle.response_complete or cycle.more_body
        return is_asking or self.flow.write_paused

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
