"""How the training of a Budget Predictor went, over steps, and what it spends on each source."""

from collections.abc import Sequence
from typing import Any, Final, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from buddy.errors import ResultError
from buddy.lab.plots.figures import COLUMN_INCHES
from buddy.lab.plots.read.fields import Fields, open_results
from buddy.lab.plots.style import BLUE, GREY, in_paper_style, legend_below, look, new_figure

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


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]], *, width: float = COLUMN_INCHES, title: str | None = None
) -> Figure:
    """Draw four panels, a line a run.

    Of a single run, a dashed line in the reward's panel is the best constant budget of the
    validation prompts, and a fifth panel has the mean budget of each of their sources; its dashed
    line is that constant budget.

    Args:
        records: What `buddy train-budget` writes; runs are named by the settings that differ.
        width: In inches.
        title: Above the figure.

    Raises:
        ResultError: Records that cannot be drawn.
    """
    runs = [_curve(results) for results in open_results(records, "predictor")]
    evaluation = _evaluation(records)
    sources = _sources(evaluation)
    panels = _panels(width, title, len(sources))
    figure = cast(Figure, panels[0].get_figure())
    for axes, (name, label) in zip(panels, PANELS.items(), strict=False):
        for place, run in enumerate(runs):
            axes.plot(run["step"], run[name], **{**look(place), "marker": None})
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
        axes.axhline(evaluation.number("constant_reward"), **_CONSTANT)
    if evaluation is not None and sources:
        _bars(panels[-1], sources, evaluation.number("constant_blocks", 0.0))
    if len(runs) > 1:
        lines = [Line2D([], [], **{**look(place), "marker": None}) for place in range(len(runs))]
        legend_below(figure, lines, run_names(records))
    return figure


def _panels(width: float, title: str | None, bars: int) -> list[Axes]:
    heights = [_PANEL_INCHES] * len(PANELS) + [_PANEL_INCHES / 2 + _BAR_INCHES * bars] * (bars > 0)
    figure = new_figure(width, sum(heights) + 0.4, title)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0].tolist()
    for axes in panels[1 : len(PANELS)]:
        axes.sharex(panels[0])
    return cast(list[Axes], panels)


def _evaluation(records: Sequence[dict[str, Any]]) -> Fields | None:
    """Where there was but one run: several would be several lines that look alike."""
    found = records[0]["results"].get("evaluation")
    return Fields(found, "evaluation") if len(records) == 1 and found is not None else None


def _sources(evaluation: Fields | None) -> dict[str, float]:
    """Mean blocks by source, most first; none in records older than they are."""
    given = evaluation.get("by_source") if evaluation is not None else None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise cast(Fields, evaluation).wrong("by_source", "an object of sources")
    blocks = {
        name: Fields(one, f"evaluation, by_source, {name}").positive("blocks")
        for name, one in given.items()
    }
    return dict(sorted(blocks.items(), key=lambda item: -item[1]))


def _bars(axes: Axes, sources: dict[str, float], constant: float) -> None:
    axes.barh(list(sources), list(sources.values()), height=0.7, color=BLUE)
    axes.axvline(constant, **_CONSTANT)
    axes.invert_yaxis()
    axes.set_title("Mean budget by source (blocks)", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(visible=True, axis="x")


def _curve(results: Fields) -> dict[str, tuple[float, ...]]:
    if not isinstance(results.get("curve"), dict):
        raise results.wrong("curve", "an object of lists")
    curve = Fields(results.get("curve"), f"{results.where}, curve")
    steps = curve.numbers("step", None, 0.0)
    return {"step": steps} | {name: curve.numbers(name, len(steps)) for name in PANELS}


def run_names(records: Sequence[dict[str, Any]]) -> list[str]:
    """Of each run, the settings by which it differs from another.

    Raises:
        ResultError: Two runs had the same settings.
    """
    settings = [_settings(record.get("config")) for record in records]
    keys = [key for key in settings[0] if len({repr(one.get(key)) for one in settings}) > 1]
    names = [", ".join(f"{key} {one.get(key)}" for key in keys) for one in settings]
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
