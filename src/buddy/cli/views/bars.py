"""Bars: how far long work has come. Bars on a terminal, and a line now and then elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_QUIET_S: Final = 30.0
"""A line comes after so long without one."""
_SOON_S: Final = 10.0
"""Another tenth of the work is worth a line after so long without one."""
_GROWTH: Final = 0.05
"""Lines are never nearer than this share of the time that the work has taken, so they stay few."""


class Bars(Progress):
    """Rich's Progress with the columns that Buddy shows.

    Where stderr is no terminal, nothing is drawn over: a line says how far the work has come after
    30 seconds, or at another tenth of it, and the more rarely the longer it takes.

    Args:
        console: Where it is shown.
        counts: Show how many of how many; else the share alone.
        keep: Leave the last state on the screen.
        options: Others of Progress.
    """

    def __init__(
        self, console: Console, *, counts: bool = True, keep: bool = False, **options: Any
    ) -> None:
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *([MofNCompleteColumn()] if counts else []),
            TextColumn("{task.fields[news]}", markup=False),
            TimeRemainingColumn(compact=True),
        ]
        super().__init__(
            *columns,
            console=console,
            transient=not keep,
            disable=not console.is_terminal,
            **options,
        )
        self._counts, self._keep = counts, keep
        self._said: dict[TaskID, tuple[float, float]] = {}
        """When a line last said something of each task, and how much was done then."""

    def add_task(  # type: ignore[override]  # rich names what is left to fields here
        self, description: str, *, news: str = "", **fields: Any
    ) -> TaskID:
        """Add a task, as Progress does; `news` is shown beside the bar."""
        task = super().add_task(description, news=news, **fields)
        self._said[task] = (self.get_time(), -1.0)
        return task

    def counter(self, description: str) -> Callable[[int, int], None]:
        """A new task, and what moves it on: called with how much is done, of how much."""
        task = self.add_task(description)
        return lambda done, total: self.update(task, completed=done, total=total)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, as Progress does."""
        super().update(task_id, **changes)
        self._tell_if_due(self._tasks[task_id])

    def advance(self, task_id: TaskID, advance: int | float = 1) -> None:
        """Move a task on, as Progress does."""
        super().advance(task_id, advance)
        self._tell_if_due(self._tasks[task_id])

    def stop(self) -> None:
        """End as Progress does; the last state is said where it would stay on the screen."""
        super().stop()
        for task in self.tasks if self.disable and self._keep else []:
            if task.started and self._said[task.id][1] != task.completed:
                self._tell(task)

    def _tell_if_due(self, task: Task) -> None:
        if not self.disable:
            return
        said_at, done = self._said[task.id]
        since = self.get_time() - said_at
        tenth = task.total and int(10 * task.completed / task.total) > int(10 * done / task.total)
        least = max(_SOON_S if tenth else _QUIET_S, _GROWTH * (task.elapsed or 0))
        if since >= least:
            self._tell(task)

    def _tell(self, task: Task) -> None:
        self._said[task.id] = (self.get_time(), task.completed)
        parts = []
        if task.total is None:
            parts.append(f"{task.completed:,.0f}")
        elif self._counts:
            parts.append(f"{task.completed:,.0f}/{task.total:,.0f}")
        else:
            parts.append(f"{task.percentage:.0f} %")
        parts.append(task.fields["news"])
        if task.time_remaining:
            parts.append(f"{timedelta(seconds=round(task.time_remaining))} left")
        self.console.print(f"{task.description}: {', '.join(filter(None, parts))}")


@contextmanager
def stoppable_bars(console: Console, farewell: str) -> Iterator[Bars]:
    """Progress bars; Ctrl-C within ends the command with a farewell."""
    try:
        with Bars(console) as bars:
            yield bars
    except KeyboardInterrupt:
        console.print(farewell, style="dim")
        raise typer.Exit(130) from None
