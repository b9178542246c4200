"""The progress bars of a stage 2 run: measuring, then steps; evaluations and warnings above."""

from typing import TYPE_CHECKING

from buddy.cli.views.run_bar import RunBar

if TYPE_CHECKING:
    from buddy.training.predictor.evaluation import PredictorEvaluation
    from buddy.training.predictor.run import BudgetListener
    from buddy.training.predictor.trainer import PredictorStep

_SMOOTHING = 0.02
"""Weight of the newest step in the reward that is shown."""


class BudgetBar(RunBar):
    """Shows a run on stderr while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._reward: float | None = None

    def __enter__(self) -> "BudgetBar":
        self._progress.start()
        return self

    def listener(self) -> "BudgetListener":
        """What the run is to call."""
        from buddy.training.predictor.run import BudgetListener

        console = self._progress.console
        return BudgetListener(
            measured=lambda what, done, rows: self._show(f"measuring {what} prompts", done, rows),
            started=lambda step, steps: self._show("training", step, steps),
            stepped=self._stepped,
            evaluated=self._evaluated,
            warned=lambda text: console.print(f"warning: {text}"),
        )

    def _stepped(self, report: "PredictorStep") -> None:
        if self._reward is None:
            self._reward = report.reward
        self._reward += _SMOOTHING * (report.reward - self._reward)
        task = self._progress.tasks[-1]
        news = f"reward {self._reward:.3f}  entropy {report.entropy:.2f}"
        self._progress.update(task.id, completed=report.step, news=news)

    def _evaluated(self, step: int, found: "PredictorEvaluation") -> None:
        self._progress.console.print(
            f"step {step}  {found.blocks:.1f} blocks, {len(found.choices)} distinct  "
            f"reward {found.reward:.3f}  best constant {found.constant_reward:.3f} "
            f"({found.constant_blocks} blocks)  best of each {found.best_reward:.3f}"
        )
