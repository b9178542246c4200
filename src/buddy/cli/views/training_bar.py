"""The progress bar of a training run: loss, speed, time left; evaluations and warnings above it."""

from typing import TYPE_CHECKING

from buddy.cli.views.run_bar import RunBar

if TYPE_CHECKING:
    from buddy.training.router.evaluate import Evaluation
    from buddy.training.router.run import Listener
    from buddy.training.router.trainer import StepReport

_SMOOTHING = 0.05
"""Weight of the newest step in the loss and the speed that are shown."""


class TrainingBar(RunBar):
    """Shows a run on stderr while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._task = self._progress.add_task("training", total=None, start=False)
        self._loss: float | None = None
        self._speed = 0.0
        self.has_begun = False

    def __enter__(self) -> "TrainingBar":
        return self

    def listener(self) -> "Listener":
        """What the run is to call."""
        from buddy.training.router.run import Listener

        return Listener(
            started=self._started,
            stepped=self._stepped,
            evaluated=self._evaluated,
            warned=lambda text: self._progress.console.print(f"warning: {text}"),
        )

    def _started(self, step: int, steps: int) -> None:
        self.has_begun = True
        self._progress.start()
        self._progress.start_task(self._task)
        self._progress.update(self._task, completed=step, total=steps)

    def _stepped(self, report: "StepReport") -> None:
        speed = report.num_tokens / report.seconds
        if self._loss is None:
            self._loss, self._speed = report.loss, speed
        self._loss += _SMOOTHING * (report.loss - self._loss)
        self._speed += _SMOOTHING * (speed - self._speed)
        self._progress.update(
            self._task,
            completed=report.step,
            news=f"loss {self._loss:.3f}  {self._speed:,.0f} tokens/s",
        )

    def _evaluated(self, step: int, found: "list[Evaluation]") -> None:
        cells = "  ".join(f"{one.blocks}: {one.cross_entropy:.3f}" for one in found)
        plans = "  ".join(f"{one.blocks}: {one.distinct_plans}" for one in found)
        self._progress.console.print(f"step {step}  cross-entropy by blocks  {cells}")
        self._progress.console.print(
            f"{'':>{len(str(step)) + 5}}  distinct plans           {plans}"
        )
