"""The progress bars of `buddy train-ledger`: measuring answers, then means; findings above."""

from typing import TYPE_CHECKING, Any

from buddy.cli.views.run_bar import RunBar

if TYPE_CHECKING:
    from buddy.training.ledger.run import LedgerListener


class LedgerBar(RunBar):
    """Shows a run on stderr while it lasts."""

    def __enter__(self) -> "LedgerBar":
        self._progress.start()
        return self

    def listener(self) -> "LedgerListener":
        """What the run is to call."""
        from buddy.training.ledger.run import LedgerListener

        console = self._progress.console
        return LedgerListener(
            measured=lambda what, done, of: self._show(f"measuring {what}", done, of),
            found=self._found,
            warned=lambda text: console.print(f"warning: {text}"),
        )

    def _found(self, one: dict[str, Any]) -> None:
        self._progress.console.print(
            f"mean {one['mean']:2d} blocks  constant {one['constant']:.3f}  ledger "
            f"{one['ledger']:.3f} at {one['blocks']:.2f}  difference {one['difference']:+.3f} "
            f"± {one['stderr']:.3f}",
            highlight=False,
        )
