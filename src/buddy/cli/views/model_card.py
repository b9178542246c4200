"""A model card: laid out on a terminal, as it was written elsewhere."""

import sys

from buddy.checkpoint.card import Card, write_card
from buddy.errors import ModelError


def show_card(card: Card | None, model: str) -> None:
    """Print the card to stdout.

    Raises:
        ModelError: There is none.
    """
    if card is None:
        raise ModelError(
            f"{model} has no model card on this machine: expected README.md in its folder; see "
            "the page that it was published on"
        )
    if not sys.stdout.isatty():
        sys.stdout.write(write_card(card))
        return
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.text import Text

    def steers_nothing(text: str) -> str:
        """Drop escapes that a terminal would follow: anybody may have written the card."""
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)

    console = Console()
    for name, value in card.facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        line = Text(steers_nothing(str(name)), style="bold")
        console.print(line.append(f"  {steers_nothing(text)}", style="not bold"))
    console.print(Markdown(steers_nothing(card.text)))
