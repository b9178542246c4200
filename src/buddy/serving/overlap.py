"""What a text that comes in pieces may be the beginning of."""


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with, and is longer than."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
