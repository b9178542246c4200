"""The mix: rows of six kinds of prompts, with answers, that ship with Buddy."""

from importlib.resources import files
from pathlib import Path
from typing import Final

MIX: Final = "shipped:mix"
"""What a source names in the place of a file."""
MIX_KINDS: Final = ("instructions", "maths", "summaries", "code", "text", "choice")
"""What the rows name as their source; the rows take turns in this order."""


def mix_path() -> Path:
    """The JSON-lines file of the mix: 360 rows, as `buddy.data.examples` reads them."""
    return Path(str(files(__package__) / "shipped" / "mix.jsonl"))
