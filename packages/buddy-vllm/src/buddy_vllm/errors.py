"""Every error that the plugin raises on purpose; each says what is wrong and what to do.

BuddyVllmError
├── BudgetError        a budget of a request that cannot be read or spent
├── ExportError        a folder that `buddy export` did not write, or that has changed since
└── UnsupportedError   a version or a mode of vLLM that the plugin does not serve
"""


class BuddyVllmError(ValueError):
    """Base of every error that the plugin raises on purpose."""


class BudgetError(BuddyVllmError):
    """A budget of a request that cannot be read or spent."""


class ExportError(BuddyVllmError):
    """A folder that `buddy export` did not write, or that has changed since."""


class UnsupportedError(BuddyVllmError):
    """A version or a mode of vLLM that the plugin does not serve."""
