"""The docs' figure of a router for frozen weights: which blocks each kind of prompt does without.

python benchmarks/routing_figure.py results/routing/smollm2-135m.json docs/figures/routing.png
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from buddy.lab.plots import style
from buddy.lab.plots.draw.heatmap import KEPT, SKIPPED, VARIES
from buddy.lab.plots.names import text_name
from buddy.lab.plots.read.cells import draw_cells
from buddy.records import read_record

COLOURS = (SKIPPED, VARIES(0.0), VARIES(1.0), KEPT)
"""Of blocks that go first, next, last, and stay."""


def places(record):
    """The depth at which each kind loses a block, deepest first, or that the block stays."""
    results, config = record["results"], record["config"]
    depths, blocks = config["depths"], config["num_blocks"]
    rows = {}
    for kind, found in results["confirmed"].items():
        order = results["orders"][found["order"] if found["is_kept"] else results["common"]]
        row = np.full(blocks, len(depths))
        for place, depth in reversed(list(enumerate(depths))):
            row[order[: blocks - depth]] = place
        rows[kind] = row
    return rows, depths


@style.in_paper_style
def draw(records, page):
    """A row for each kind of prompt; a cell for each block."""
    (record,) = records
    rows, depths = places(record)
    figure = page.figure(1.35)
    axes = figure.subplots()
    colours = np.array([[to_rgb(COLOURS[place]) for place in row] for row in rows.values()])
    draw_cells(axes, colours, [text_name(kind) for kind in rows])
    axes.set_xlabel("Block")
    said = [f"goes at {depth} blocks" for depth in depths] + [f"runs at {depths[-1]} blocks, too"]
    handles = [Patch(facecolor=colour) for colour in COLOURS]
    style.legend_below(figure, handles, said, handlelength=1.3)
    return figure


if __name__ == "__main__":
    record, out = map(Path, sys.argv[1:])
    draw([read_record(record)], width=4.6).savefig(out, dpi=200)
