"""Work side by side: on a CPU one thread of torch for each, as small passes use two badly."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")


class Workers:
    """Threads that run work side by side.

    Args:
        number: Threads.
    """

    def __init__(self, number: int) -> None:
        self.number, self._is_stopped = number, Event()

    def map(self, work: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
        """What the work makes of each item, in their order.

        When one fails, or the caller is interrupted, the others end at their next `check`.
        """
        with ThreadPoolExecutor(self.number) as pool:
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


@contextmanager
def side_by_side(device: torch.device) -> Iterator[Workers]:
    """As many workers as torch has threads, each with one; a single one beside a CPU.

    Results do not depend on how many there are.
    """
    threads = torch.get_num_threads()
    number = min(threads, os.cpu_count() or 1) if device.type == "cpu" else 1
    torch.set_num_threads(1)
    try:
        yield Workers(number)
    finally:
        torch.set_num_threads(threads)
