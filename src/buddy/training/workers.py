"""Work side by side: on a CPU one thread of torch for each, as small passes use two badly."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")


class Workers:
    """Threads that run work side by side, as many as torch has; one where a GPU computes.

    Results do not depend on how many there are.

    Args:
        device: Where passes are computed.
    """

    def __init__(self, device: torch.device) -> None:
        threads = min(torch.get_num_threads(), os.cpu_count() or 1)
        self._number = threads if device.type == "cpu" else 1
        self._is_stopped = Event()

    def map(self, work: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
        """What the work makes of each item, in their order; each has one thread of torch.

        When one fails, or the caller is interrupted, the others end at their next `check`.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._map(work, items)
        finally:
            torch.set_num_threads(threads)

    def _map(self, work: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
        if self._number == 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(self._number) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                failed = [future for future in futures if future.done() and future.exception()]
                if failed:
                    raise failed[0].exception() or AssertionError
                return [future.result() for future in futures]
            except BaseException:
                self._is_stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def check(self) -> None:
        """End this thread's work if other work has failed.

        Raises:
            InterruptedError: It has.
        """
        if self._is_stopped.is_set():
            raise InterruptedError
