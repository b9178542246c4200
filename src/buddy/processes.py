"""Processes that a launcher starts side by side: torchrun's, or accelerate's.

Processes that share work are `Ranks`: each does its part of some items, and all learn what each
found, so all go on alike and end with the same result. The first, the writer, writes and prints.

Whatever fails ends all: the first process that fails says why, and the others, which find it gone,
end without a word. One that neither answers nor ends is given up after 30 minutes, as gloo does.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from buddy.errors import BuddyError

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share some work, as one of them sees them.

    Attributes:
        rank: Of this process, from 0.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files for all."""
        return self.rank == 0

    def exchange(self, value: Found) -> list[Found]:
        """What each process has, in the order of ranks; each of them calls it.

        Args:
            value: What this one has; it can be pickled.

        Raises:
            BuddyError: Another process has ended.
        """
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with _answered():
            dist.all_gather_object(values, value)
        return values

    def from_writer(self, work: Callable[[], Found]) -> Found:
        """What the writer's work gives; the others wait for it.

        Raises:
            BuddyError: As `exchange`, and whatever the work raises on the writer.
        """
        return self.exchange(cast(Found, work() if self.is_writer else None))[0]

    def share(self, items: Sequence[Item], work: Callable[[Item], Found]) -> Iterator[Found]:
        """What some work makes of each item, in their order; a process does one item of each round.

        The results of a round are there at once, so a caller that stops in the middle of one has
        left out no more than what came after.

        Args:
            items: The same on all processes.
            work: From an item to what can be pickled.

        Raises:
            BuddyError: As `exchange`.
        """
        for start in range(0, len(items), self.size):
            own = items[start + self.rank :][:1]
            found = self.exchange([work(item) for item in own])
            yield from (result for results in found for result in results)

    def sum_to_writer(self, tensors: "Iterable[Tensor]") -> None:
        """Sum tensors over all processes into the writer's, in place; those of the others are zero.

        Args:
            tensors: On the host; as many, of the same shapes, on all processes.

        Raises:
            BuddyError: As `exchange`.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        for tensor in tensors:
            with _answered():
                dist.reduce(tensor, 0)
            if not self.is_writer:
                tensor.zero_()


ALONE: Final = Ranks()
"""A process that shares its work with no other."""


class _Launch:
    """What this process knows of its launch, once it has joined the others."""

    ranks: Ranks = ALONE
    store: Any = None


def number_of_processes() -> int:
    """How many a launcher has started; 1 without one."""
    number = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    return int(number) if number.isdecimal() else 1


def launched() -> Ranks:
    """The processes that were launched with this one and have joined; this one alone without."""
    return _Launch.ranks


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that were launched side by side; within, only the writer prints.

    Raises:
        BuddyError: They cannot be reached.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://"))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise BuddyError(
            f"the {number_of_processes()} processes of this launch cannot reach each other "
            f"({error}): start them by torchrun or accelerate launch"
        ) from error
    _Launch.ranks, _Launch.store = Ranks(rank, size), store
    with ExitStack() as stack:
        if rank > 0:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def says_failures() -> bool:
    """Whether this process is to say what went wrong: of a launch, the first that asks; once."""
    if _Launch.store is None:
        return number_of_processes() == 1 or os.environ["RANK"] == "0"
    try:
        return bool(_Launch.store.add("failures", 1) == 1)
    except RuntimeError:  # the process that keeps it has ended, and has said why
        return False


@contextmanager
def _answered() -> Iterator[None]:
    """Say in one line where another process does not answer, within."""
    try:
        yield
    except RuntimeError as error:
        raise BuddyError(
            "another process of this launch has ended without a word, or has not answered for 30 "
            "minutes: it may have been stopped for want of memory; the same command goes on from "
            "what was kept"
        ) from error


def check_alone(what: str) -> None:
    """Refuse to be one of several processes, where each would do the whole work.

    Args:
        what: Whose work it is, as `buddy serve`.

    Raises:
        BuddyError: There are several.
    """
    if number_of_processes() > 1:
        raise BuddyError(
            f"{what} is work for one process, and {number_of_processes()} were launched: start it "
            "without accelerate launch or torchrun (buddy train of adapters and routers, "
            "importance, search and eval share their work)"
        )
