"""Fuzzers: few examples in the suite, always the same ones; `make fuzz` draws as many as named."""

import os
import struct

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from buddy.errors import BuddyError

EXAMPLES = int(os.environ.get("BUDDY_FUZZ", "0"))
FUZZ = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner)
    ),
    max_leaves=8,
)
_NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@st.composite
def damaged(draw, content, most=None):
    """Bytes to which one to four things befell, each before the byte `most`.

    Args:
        content: Whole ones.
        most: None = anywhere.
    """
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, min(len(found), most or len(found)) - 1)))
        length = draw(st.integers(1, 16))
        what = draw(st.sampled_from(["flip", "write", "number", "cut", "insert", "repeat", "end"]))
        if what == "flip" and found:
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "write":
            found[at : at + length] = draw(st.binary(min_size=length, max_size=length))
        elif what == "number":
            found[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(_NUMBERS)))
        elif what == "cut":
            del found[at : at + length]
        elif what == "insert":
            found[at:at] = draw(st.binary(max_size=length))
        elif what == "repeat":
            found[at:at] = found[at : at + length]
        else:
            del found[at:]
    return bytes(found)


def refusal(call):
    """Call it; the error of ours that it ends with, or None. Any other error comes out."""
    try:
        call()
    except BuddyError as error:
        return error
    return None


def only_ours(call):
    """Call it; an error must be ours, and one line."""
    error = refusal(call)
    assert "\n" not in str(error)
    return error
