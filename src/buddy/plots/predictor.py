"""How the training of a Budget Predictor went: loss, reward, cross-entropy, entropy over steps."""

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from buddy.errors import ResultError
from buddy.plots.fields import Fields, open_results
from buddy.plots.figures import COLUMN_INCHES
from buddy.plots.style import GREY, in_paper_style, legend_below, look, new_figure

PANELS: Final = {
    "loss": "Policy loss",
    "reward": "Reward",
    "cross_entropy": "Cross-entropy of the answers (nats per token)",
    "entropy": "Entropy of the policy (nats)",
}
_PANEL_INCHES: Final = 0.8
_SECTIONS: Final = ("model", "predictor", "grpo", "optim")


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]], *, width: float = COLUMN_INCHES, title: str | None = None
) -> Figure:
    """Draw four panels, a line a run.

    A dashed line in the reward's panel is the best constant budget of the validation prompts.

    Args:
        records: What `buddy train-budget` writes; runs are named by the settings that differ.
        width: In inches.
        title: Above the figure.

    Raises:
        ResultError: Records that cannot be drawn.
    """
    runs = [_curve(results) for results in open_results(records, "predictor")]
    figure = new_figure(width, len(PANELS) * _PANEL_INCHES + 0.4, title)
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
        for place, run in enumerate(runs):
            axes.plot(run["step"], run[name], **{**look(place), "marker": None})
        axes.set_title(label, loc="left")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid(visible=True)
    panels[-1].set_xlabel("Step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    _best_constants(panels[list(PANELS).index("reward")], records)
    if len(runs) > 1:
        lines = [Line2D([], [], **{**look(place), "marker": None}) for place in range(len(runs))]
        legend_below(figure, lines, run_names(records))
    return figure


def _curve(results: Fields) -> dict[str, tuple[float, ...]]:
    if not isinstance(results.get("curve"), dict):
        raise results.wrong("curve", "an object of lists")
    curve = Fields(results.get("curve"), f"{results.where}, curve")
    steps = curve.numbers("step", None, 0.0)
    return {"step": steps} | {name: curve.numbers(name, len(steps)) for name in PANELS}


def _best_constants(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Where there was but one run: several would be several lines that look alike."""
    found = records[0]["results"].get("evaluation")
    if len(records) == 1 and found is not None:
        constant = Fields(found, "evaluation").number("constant_reward")
        axes.axhline(constant, color=GREY, linestyle=(0, (2, 2)), linewidth=0.8)


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
