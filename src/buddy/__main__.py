"""`python -m buddy` is `buddy`. Ctrl-C ends it with one line from the first import on."""

import gc
import os
import signal
from typing import Any, NoReturn


def _leave(*_: Any) -> NoReturn:
    """End at once: nothing has begun that would have to be ended in order."""
    os.write(2, b"buddy: interrupted\n")
    os._exit(130)


is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if is_interruptible:
    signal.signal(signal.SIGINT, _leave)

from buddy.cli.main import main  # noqa: E402
from buddy.cli.streams import open_streams  # noqa: E402


def command() -> None:
    """Entry point of the command `buddy`."""
    open_streams()
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    finally:
        gc.freeze()  # else Python looks through all that was imported, twice, before it ends
        if is_interruptible:  # a second one, while threads are waited for, says no more
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    command()
