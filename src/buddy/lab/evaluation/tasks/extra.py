"""The packages that only evaluation needs, and what to do where they are missing."""

import importlib.util

from buddy.errors import DataError


def require_lm_eval() -> None:
    """Refuse to go on without lm-evaluation-harness.

    Raises:
        DataError: It is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise DataError('lm-evaluation-harness is not installed: pip install "buddy-llm[eval]"')
