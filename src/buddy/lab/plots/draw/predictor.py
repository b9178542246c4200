"""How the training of a Budget Predictor went, over steps, and what it spends on each source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from buddy.errors import ResultError
from buddy.lab.plots.read import parts
from buddy.lab.plots.style import BLUE, GREY, Page, Records, in_paper_style, legend_below, look

PANELS: Final = {
    "loss": "Policy loss",
    "reward": "Reward",
    "cross_entropy": "Cross-entropy of the answers (nats per token)",
    "entropy": "Entropy of the policy (nats)",
}
_PANEL_INCHES: Final = 0.8
_BAR_INCHES: Final = 0.13
_CONSTANT: Final[dict[str, Any]] = {"color": GREY, "linestyle": (0, (2, 2)), "linewidth": 0.8}
_SECTIONS: Final = ("model", "predictor", "grpo", "optim")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Curve(parts.RecordPart):
    """Figures by step."""

    step: parts.Many[parts.NotNegative]
    loss: tuple[parts.Drawn, ...]
    reward: tuple[parts.Drawn, ...]
    cross_entropy: tuple[parts.Drawn, ...]
    entropy: tuple[parts.Drawn, ...]

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        for name in PANELS:
            parts.check_length(name, getattr(self, name), len(self.step))


@dataclass(frozen=True, slots=True)
class _Source(parts.RecordPart):
    """What the predictor spends on one source."""

    blocks: parts.Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluation(parts.RecordPart):
    """What validation prompts get; older records do not tell sources apart."""

    constant_reward: parts.Drawn
    constant_blocks: parts.NotNegative | None = None
    by_source: dict[str, _Source] | None = None

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        if self.by_source and self.constant_blocks is None:
            raise ResultError("lacks constant_blocks")

    def most_first(self) -> dict[str, float]:
        """Mean blocks by source."""
        blocks = {name: source.blocks for name, source in (self.by_source or {}).items()}
        return dict(sorted(blocks.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """Results of stage 2."""

    curve: _Curve
    evaluation: _Evaluation | None = None


@in_paper_style
def draw(records: Records, page: Page) -> Figure:
    """Draw four panels, a line a run.

    Of a single run, a dashed line in the reward's panel is the best constant budget of the
    validation prompts, and a fifth panel has the mean budget of each of their sources; its dashed
    line is that constant budget.

    Records: what `buddy train-budget` writes; runs are named by the settings that differ.
    """
    results = parts.read_results(records, "predictor", _Results)
    curves = [run.curve for run in results]
    # Several runs would be several lines that look alike.
    evaluation = results[0].evaluation if len(results) == 1 else None
    sources = {} if evaluation is None else evaluation.most_first()
    panels = _panels(page, len(sources))
    figure = cast(Figure, panels[0].get_figure())
    for axes, (name, label) in zip(panels, PANELS.items(), strict=False):
        for place, curve in enumerate(curves):
            axes.plot(curve.step, getattr(curve, name), **{**look(place), "marker": None})
        axes.set_title(label, loc="left")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.ticklabel_format(axis="y", useOffset=False)  # an entropy may move by 1e-5 in all
        axes.grid(visible=True)
        axes.tick_params(labelbottom=axes is panels[len(PANELS) - 1])
    panels[len(PANELS) - 1].set_xlabel("Step")
    panels[0].xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    if evaluation is not None:
        axes = panels[list(PANELS).index("reward")]
        axes.axhline(evaluation.constant_reward, **_CONSTANT)
        if sources:
            _bars(panels[-1], sources, evaluation.constant_blocks or 0.0)
    if len(curves) > 1:
        styles = [{**look(place), "marker": None} for place in range(len(curves))]
        lines = [Line2D([], [], **style) for style in styles]
        legend_below(figure, lines, run_names(records))
    return figure


def _panels(page: Page, bars: int) -> list[Axes]:
    heights = [_PANEL_INCHES] * len(PANELS) + [_PANEL_INCHES / 2 + _BAR_INCHES * bars] * (bars > 0)
    figure = page.figure(sum(heights) + 0.4)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0].tolist()
    for axes in panels[1 : len(PANELS)]:
        axes.sharex(panels[0])
    return cast(list[Axes], panels)


def _bars(axes: Axes, sources: dict[str, float], constant: float) -> None:
    axes.barh(list(sources), list(sources.values()), height=0.7, color=BLUE)
    axes.axvline(constant, **_CONSTANT)
    axes.invert_yaxis()
    axes.set_title("Mean budget by source (blocks)", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(visible=True, axis="x")


def run_names(records: Sequence[dict[str, Any]]) -> list[str]:
    """The settings by which each run differs from another.

    Raises:
        ResultError: Two runs had the same settings.
    """
    settings = [_settings(record.get("config")) for record in records]
    keys = [key for key in settings[0] if len({repr(own.get(key)) for own in settings}) > 1]
    names = [", ".join(f"{key} {own.get(key)}" for key in keys) for own in settings]
    for name in names:
        if names.count(name) > 1:
            raise ResultError(
                "two of the records are of the same settings: the predictor figure tells runs "
                "apart by them; leave one out"
            )
    return names


def _settings(config: Any) -> dict[str, Any]:
    sections = {name: config.get(name) for name in _SECTIONS} if isinstance(config, dict) else {}
    return {
        f"{name}.{key}": value
        for name, section in sections.items()
        if isinstance(section, dict)
        for key, value in section.items()
    }
