"""Processes that a launcher starts side by side: torchrun's, or accelerate's."""

import os

from buddy.errors import BuddyError


def number_of_processes() -> int:
    """How many a launcher has started; 1 without one."""
    number = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    return int(number) if number.isdecimal() else 1


def check_alone(what: str) -> None:
    """Refuse to be one of several processes, where each would do the whole work.

    Args:
        what: Whose work it is, as `buddy eval`.

    Raises:
        BuddyError: There are several.
    """
    if number_of_processes() > 1:
        raise BuddyError(
            f"{what} is work for one process, and {number_of_processes()} were launched: start it "
            "without accelerate launch or torchrun (buddy train shares the batches of adapters and "
            "routers)"
        )
