"""Keeps transformers and PEFT from drawing bars and warnings of their own while a model loads."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar, and errors only, until the block ends."""
    from transformers.utils import logging

    switch = cast(Any, logging)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    switch.set_verbosity_error()
    switch.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            switch.enable_progress_bar()


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without PEFT's warning that it reads a name which transformers has changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
