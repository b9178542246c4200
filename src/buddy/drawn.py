"""First weights that are drawn: by a seed, on the CPU, and nobody else's draws are touched."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """Let the CPU's generator draw by a seed, and go on afterwards as if it had not.

    No GPU is seeded or set up: `torch.random.fork_rng()` and `torch.manual_seed` would do so with
    every one of the machine.

    Args:
        seed: Of what is drawn within.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
