"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Final

import typer

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Preset, hub id, folder, GGUF file or Buddy checkpoint."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        help='Share of the blocks to run: 0.75, 75%, "18 blocks" or auto. Full depth if not given.',
    ),
]
PrefillBudget = Annotated[
    str | None,
    typer.Option(help="Budget of the prompt's tokens, if another: 1.0 costs nothing in decoding."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=2**31, help="Stop after this many tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this much probability.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of sampling.")]
System = Annotated[str | None, typer.Option(help="System message.")]
Reroute = Annotated[
    str,
    typer.Option(help="Choose blocks again every step (step), never (prefill), or every N steps."),
]
KVPolicy = Annotated[
    str | None,
    typer.Option(help="What skipped blocks leave in the cache: zero, mask, project or lazy."),
]
Engine = Annotated[
    str,
    typer.Option(help="Who decodes: native (compiled, CPU), general, or auto: native if it can."),
]
Quant = Annotated[
    str | None,
    typer.Option(help="Weights in fewer bits: int8 or int4. As they are if not given."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="Who chooses the blocks: routed, static, static:12,11,20, random:SEED or full."
    ),
]

DEFAULT_MAX_NEW_TOKENS: Final = 256


def parse_reroute(text: str) -> str | int:
    """`step` and `prefill` as they are, a number as a number; the engine refuses the rest."""
    return int(text) if text.isascii() and text.isdecimal() else text


Recipe = Annotated[Path, typer.Argument(help="TOML file; see recipes/.", show_default=False)]
RunFolder = Annotated[Path, typer.Option(help="Folder for checkpoint, logs and training state.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optim.steps=250."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the training state in --out.")]
