"""What the progress bars of all training runs share."""

from types import TracebackType

from buddy.cli.views.bars import Bars
from buddy.cli.views.display import stderr


class RunBar:
    """Shows a run on stderr while it lasts; each kind says what entering begins."""

    def __init__(self) -> None:
        self._progress = Bars(stderr(), keep=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def _show(self, what: str, done: int, total: int, news: str = "") -> None:
        for task in self._progress.tasks:
            if task.description == what:
                self._progress.update(task.id, completed=done, total=total, news=news)
                return
        self._progress.add_task(what, completed=done, total=total, news=news)
