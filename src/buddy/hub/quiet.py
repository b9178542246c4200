"""Keeps transformers and PEFT from drawing bars and warnings of their own while a model loads."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

# PEFT imports bitsandbytes where it is there, which warns of kernels that Buddy has no use for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@contextmanager
def quiet_transformers(level: int = logging.ERROR) -> Iterator[None]:
    """No progress bar, and nothing below this level, until the block ends."""
    from transformers.utils import logging as own_logging

    switch = cast(Any, own_logging)  # its functions carry no types
    verbosity, bars = own_logging.get_verbosity(), own_logging.is_progress_bar_enabled()
    switch.set_verbosity(level)
    switch.disable_progress_bar()
    try:
        yield
    finally:
        own_logging.set_verbosity(verbosity)
        if bars:
            switch.enable_progress_bar()


@contextmanager
def quiet_peft() -> Iterator[None]:
    """No warning of PEFT's that it reads a name which transformers has changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
