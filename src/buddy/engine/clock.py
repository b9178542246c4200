"""Clocks of work that a device is asked to do, which returns before it is done."""

import time
from collections.abc import Iterable
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
    """Marks are events in a device's stream: no step waits for another because it is timed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """The moment at which the device has done all that was asked of it so far."""
        with torch.cuda.device(self._device):
            event = cast(Any, torch.cuda.Event)(enable_timing=True)
            event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """The difference, once the device is there."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until each of these devices has done what it was asked to."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()


def clock_of(device: torch.device) -> Clock:
    """The clock that fits a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
