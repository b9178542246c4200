"""The static methods' removal orders: measured by `buddy importance` where none is there yet."""

from pathlib import Path
from typing import Final

from buddy.errors import DataError
from buddy.lab.paper.run import Run

_COMMANDS: Final = {
    "ShortGPT": ("block-influence", "none"),
    "SLEB": ("sleb", None),
    "Shortened-LLaMA PPL": ("delta-ppl", "plus"),
    "Shortened-LLaMA Taylor+": ("taylor", "plus"),
    "delta-ppl": ("delta-ppl", "ends"),
    "cosine": ("cosine", "ends"),
    "taylor": ("taylor", "ends"),
}
"""Indicator, and the blocks that it protects."""
_LEAST_FOR_PLUS: Final = 12
"""The rule "plus" keeps six blocks: of a smaller model, half could not be removed."""
STATIC: Final = ("ShortGPT", "SLEB", "Shortened-LLaMA PPL", "Shortened-LLaMA Taylor+")


def measure_order(run: Run, name: str) -> Path:
    """The record of a static method, or of an indicator, on the base model and WikiText-2.

    Raises:
        DataError: It is not there, and there is no text to measure it on.
    """
    indicator, protect = _COMMANDS[name]
    file = f"order-{name.lower().replace(' ', '-').replace('+', '-plus')}"
    path = run.path(f"{file}.json")
    data_dir = run.request.data_dir
    if data_dir is None or not (data_dir / "wikitext2/valid.txt").is_file():
        raise DataError(
            f"{name} is measured on wikitext2/valid.txt, and there is none: name the folder that "
            "holds it by --data-dir"
        )
    windows, tokens = ("32", "512") if run.request.full else ("8", "256")
    if name == "SLEB":
        windows, tokens = ("32", "512") if run.request.full else ("2", "256")
    base = run.base()
    if protect == "plus" and run.outline().num_blocks < _LEAST_FOR_PLUS:
        protect = "ends"
    tokens = str(min(int(tokens), int(run.outline().config.max_position_embeddings)))
    run.buddy(
        file,
        "importance",
        base,
        "--indicator",
        indicator,
        *(() if protect is None else ("--protect", protect)),
        *run.data(),
        "--limit",
        windows,
        "--tokens",
        tokens,
        model=base,
    )
    return path
