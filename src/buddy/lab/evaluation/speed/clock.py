"""Clocks that do not disturb what they time: a mark never waits for the device."""

import time
from typing import Any, Protocol, cast, runtime_checkable

import torch


@runtime_checkable
class Clock(Protocol):
    """Takes marks, and later says how far apart they are."""

    def mark(self) -> Any:
        """Note the present moment of the work, without waiting for it."""
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """Time from one mark to another."""
        ...


class HostClock:
    """Clock of devices that have done their work when a call returns."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        """The difference."""
        return stop - start


class CudaClock:
    """Marks are events in the stream: no step waits for another because it is timed."""

    def mark(self) -> torch.cuda.Event:
        """The moment at which the device has done all that was asked of it so far."""
        event = cast(Any, torch.cuda.Event)(enable_timing=True)
        event.record()
        return cast(torch.cuda.Event, event)

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """The difference, once the device is there."""
        cast(Any, stop).synchronize()
        return float(cast(Any, start).elapsed_time(stop)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock that fits a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
