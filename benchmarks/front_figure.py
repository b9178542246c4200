"""README's figure: decode speed against loss, by depth.

python benchmarks/front_figure.py ENGINE.json ANSWERS.json docs/figures/front.png
"""

import sys
from pathlib import Path

from depth_table import by_depth

from buddy.lab.plots import style
from buddy.records import read_record

DEPTHS = (30, 26, 22, 15)


def points(engine, kept):
    """Tokens a second of transformers, and (blocks, tokens a second, nats a token) by depth."""
    alone = next(shape for shape in engine["results"]["shapes"] if shape["batch"] == 1)
    speed = {name: 1 / cell["decode_s"] for name, cell in alone["cells"].items()}
    nats = by_depth(kept, "all", "nll")
    ours = [
        (blocks, speed["dense" if blocks == 30 else f"routed {blocks}"], nats[blocks])
        for blocks in DEPTHS
    ]
    return speed["transformers"], ours


@style.in_paper_style
def draw(records, page):
    """One curve through the depths, and transformers."""
    theirs, ours = points(*records)
    figure = page.figure(2.4)
    axes = figure.subplots()
    axes.plot([speed for _, speed, _ in ours], [nats for *_, nats in ours], **style.look(0))
    axes.plot([theirs], [ours[0][2]], **style.look(1))
    for blocks, speed, nats in ours:
        text = f"{blocks} blocks" if blocks == DEPTHS[0] else str(blocks)
        place = {"xytext": (5, 3), "textcoords": "offset points"}
        axes.annotate(text, (speed, nats), fontsize=style.SMALL, **place)
    beside = {"xytext": (5, -2), "textcoords": "offset points"}
    axes.annotate("transformers, 30", (theirs, ours[0][2]), fontsize=style.SMALL, **beside)
    axes.set_xlim(0, 1.1 * max(speed for _, speed, _ in ours))
    axes.set_ylim(2.8, 1.5)
    axes.set_xlabel("Decode, tokens/s")
    axes.set_ylabel("Loss, nats per token (down is worse)")
    axes.grid(visible=True)
    return figure


def main():
    """Draw the two records that are named."""
    *records, out = sys.argv[1:]
    draw([read_record(Path(path)) for path in records], width=4.2).savefig(out, dpi=200)


if __name__ == "__main__":
    main()
