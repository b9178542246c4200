"""Examples of random tokens for tiny models."""

import random

from buddy.data.examples import Example
from tests.tiny import VOCAB


def random_examples(count, *, seed=0, longest=12):
    draw = random.Random(seed)

    def tokens():
        return tuple(draw.randrange(2, VOCAB) for _ in range(draw.randint(2, longest)))

    return [Example(tokens(), tokens(), "random") for _ in range(count)]
