"""What a client is told of an error that ends its request alone."""

import logging
from typing import Final

from buddy.errors import BuddyError, is_failure, is_out_of_memory
from buddy.serving.rows.row import Submitted

_LOG: Final = logging.getLogger(__name__)


def why_failed(error: BaseException, submitted: Submitted) -> str:
    """What went wrong, in one line; the log has all of it.

    Raises:
        BaseException: The error, where it stops the program.
    """
    if not is_failure(error):
        raise error
    if isinstance(error, BuddyError):
        return str(error)
    if is_out_of_memory(error):
        _LOG.warning("request %d ends: there is not enough memory for it", submitted.number)
        return "there is not enough memory for this request: send a shorter one"
    _LOG.error("request %d ends by a failure of its own", submitted.number, exc_info=error)
    return f"this answer cannot be made: {type(error).__name__}"
