"""The progress bars of a training run: measuring, then steps; what it tells stands above them."""

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final

from buddy.cli.views.bars import Bars
from buddy.cli.views.display import stderr

if TYPE_CHECKING:
    from buddy.training.run import RunListener

_SMOOTHING: Final = 0.05
"""Weight of the newest step in the numbers that are shown."""
_SHOWN: Final = {
    "loss": "loss {:.4f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "reward": "reward {:.3f}",
    "entropy": "entropy {:.2f}",
}


class RunBar:
    """Shows a run on stderr while it lasts.

    Attributes:
        has_begun: The run has said something: on the main process alone.
    """

    def __init__(self) -> None:
        self._progress = Bars(stderr(), keep=True)
        self._numbers: dict[str, float] = {}
        self.has_begun = False

    def __enter__(self) -> "RunBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.has_begun:
            self._progress.stop()

    def listener(self) -> "RunListener":
        """What the run is to call."""
        from buddy.training.run import RunListener

        return RunListener(
            measured=self._show,
            started=lambda step, steps: self._show("training", step, steps),
            stepped=self._stepped,
            reported=self._print,
            warned=lambda text: self._print(f"warning: {text}"),
        )

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def _show(self, what: str, done: int, total: int) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._progress.start()
        for task in self._progress.tasks:
            if task.description == what:
                self._progress.update(task.id, completed=done, total=total)
                return
        self._progress.add_task(what, completed=done, total=total)

    def _stepped(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            before = self._numbers.get(name, value)
            self._numbers[name] = before + _SMOOTHING * (value - before)
        news = "  ".join(
            _SHOWN.get(name, f"{name} {{:.4g}}").format(value)
            for name, value in self._numbers.items()
        )
        self._progress.update(self._progress.tasks[-1].id, completed=step, news=news)
