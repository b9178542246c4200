"""Where transformers, tokenizers and PEFT work on what anybody may have written."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from buddy.errors import BuddyError, CheckpointError, is_failure, one_line

_MOST: Final = 400
"""Characters of a reason; transformers writes whole paragraphs."""
_SPEAKING: Final = (OSError, ValueError, RuntimeError)
"""Errors whose text says what is wrong; of the others the kind is said too."""


@contextmanager
def explained(what: str, advice: str, lets: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn whatever a library raises in the block into one line.

    These libraries say nowhere what they raise on values that they did not expect, and a damaged
    file makes them raise almost anything: ZeroDivisionError, AttributeError, AssertionError, a
    panic of Rust's. So everything is caught but errors of ours and what stops the program.

    Args:
        what: What could not be done.
        advice: What the user can do.
        lets: What is let through as it is.

    Raises:
        CheckpointError: A library raised something.
    """
    try:
        yield
    except BuddyError:
        raise
    except BaseException as error:
        if isinstance(error, lets) or not is_failure(error):
            raise
        raise CheckpointError(f"{what}: {reason(error)}; {advice}") from error


def reason(error: BaseException) -> str:
    """What a library's error says, in one line."""
    text = " ".join(str(error).split())
    if not isinstance(error, _SPEAKING) or not text:
        text = f"{type(error).__name__} {text}".strip()
    shown = one_line(text[:_MOST])
    return shown.rstrip(".;") if len(text) <= _MOST else f"{shown}..."
