"""The progress bars of a method's run: measuring, then steps; what it tells stands above them."""

from typing import TYPE_CHECKING

from buddy.cli.views.run_bar import RunBar

if TYPE_CHECKING:
    from buddy.training.methods import RunListener

_SMOOTHING = 0.05
"""Weight of the newest step in the loss that is shown."""
_STEPS = "training"


class MethodBar(RunBar):
    """Shows a run on stderr while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._loss: float | None = None
        self.has_begun = False

    def __enter__(self) -> "MethodBar":
        self._progress.start()
        return self

    def listener(self) -> "RunListener":
        """What the run is to call."""
        from buddy.training.methods import RunListener

        console = self._progress.console
        return RunListener(
            measured=self._show,
            started=self._started,
            stepped=self._stepped,
            told=lambda text: console.print(text, markup=False),
            warned=lambda text: console.print(f"warning: {text}", markup=False),
        )

    def _started(self, step: int, steps: int) -> None:
        self.has_begun = True
        self._show(_STEPS, step, steps)

    def _stepped(self, step: int, loss: float) -> None:
        if self._loss is None:
            self._loss = loss
        self._loss += _SMOOTHING * (loss - self._loss)
        task = next(task for task in self._progress.tasks if task.description == _STEPS)
        self._progress.update(task.id, completed=step, news=f"loss {self._loss:.4f}")
