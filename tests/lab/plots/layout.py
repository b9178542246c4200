"""Where the text of a figure stands, as drawn."""

from itertools import combinations

from matplotlib.text import Text


def drawn_texts(figure, monkeypatch):
    """Text and box of everything written when the figure is drawn, tick labels out of view not."""
    seen = {}
    original = Text.draw

    def draw(self, renderer, *args, **kwargs):
        if self.get_visible() and self.get_text().strip():
            seen[id(self)] = (self.get_text(), self.get_window_extent(renderer))
        return original(self, renderer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", draw)
        figure.canvas.draw()
    return list(seen.values())


def overlapping(texts):
    return [
        (text, other)
        for (text, a), (other, b) in combinations(texts, 2)
        # Boxes include the blank above and below the letters, which may touch.
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]


def clipped(texts, figure):
    page = figure.bbox
    return [
        text
        for text, box in texts
        if box.x0 < -0.5 or box.y0 < -0.5 or box.x1 > page.x1 + 0.5 or box.y1 > page.y1 + 0.5
    ]
