"""The progress bars of a method's run: measuring, then steps; what it tells stands above them."""

from types import TracebackType
from typing import TYPE_CHECKING

from buddy.cli.views.bars import Bars
from buddy.cli.views.display import stderr

if TYPE_CHECKING:
    from buddy.training.methods import RunListener

_SMOOTHING = 0.05
"""Weight of the newest step in the loss that is shown."""
_STEPS = "training"


class MethodBar:
    """Shows a run on stderr while it lasts."""

    def __init__(self) -> None:
        self._progress = Bars(stderr(), keep=True)
        self._loss: float | None = None
        self.has_begun = False

    def __enter__(self) -> "MethodBar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

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

    def _show(self, what: str, done: int, total: int) -> None:
        for task in self._progress.tasks:
            if task.description == what:
                self._progress.update(task.id, completed=done, total=total)
                return
        self._progress.add_task(what, completed=done, total=total)
