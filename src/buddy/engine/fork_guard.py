"""Refuses what would hang: work in a forked process on threads that stayed behind in its parent.

OpenMP keeps a team of threads for each thread that has asked for one. A fork copies what it notes
of the team, but not the threads, so the next work that is shared waits for them for ever. That
holds for torch's own operations and for compiled code alike.
"""

import os
import threading

import torch

from buddy.errors import ModelError


class _Team(threading.local):
    """What is known of this thread's team."""

    is_made = False
    is_lost = False


_team = _Team()


def check_threads() -> None:
    """Refuse to share work with threads that a fork has lost; asked where a model is about to run.

    Raises:
        ModelError: This process was forked by a thread that had a model, or ran one.
    """
    if torch.get_num_threads() == 1:
        return
    if _team.is_lost:
        raise ModelError(
            "this process was forked from one that had a model already, and would wait for ever "
            'for threads that only its parent has: start it with multiprocessing\'s "spawn", or '
            "call torch.set_num_threads(1) in it first"
        )
    _team.is_made = True


def _after_fork() -> None:
    _team.is_lost = _team.is_lost or _team.is_made


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
