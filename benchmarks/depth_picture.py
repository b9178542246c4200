"""What `buddy generate --show-depth` prints, as a picture.

python benchmarks/depth_picture.py docs/figures/show-depth.svg
"""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

COMMAND = 'buddy generate "What is the capital of France?" --budget mean:0.7 --show-depth'
WIDTH = 100
WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""The reader's own fixed-width font: nothing is fetched."""


def main():
    """Run the command as in a terminal, and draw what it prints."""
    arguments = [sys.executable, "-m", *shlex.split(COMMAND)]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    printed = subprocess.run(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    )
    # A spinner's line is drawn over and over, and not there in the end.
    lines = [line for line in printed.stdout.decode().split("\n") if "Preparing" not in line]
    text = Text.from_ansi("\n".join([f"$ {COMMAND}", *lines]).rstrip())
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True)
    console.print(text)
    form = WITHOUT_FONTS.replace("Fira Code", "ui-monospace")
    picture = console.export_svg(title="", theme=DIMMED_MONOKAI, code_format=form, unique_id="d")
    Path(sys.argv[1]).write_text(picture)


if __name__ == "__main__":
    main()
