"""Every error that Buddy raises on purpose.

BuddyError
├── BudgetError       a budget that cannot be parsed or spent
├── PolicyError       an unknown policy, or one that cannot serve this model
├── PromptError       an empty prompt, or one longer than the context
├── ModelError        a model that cannot be found, fetched or understood
│   ├── FetchError        a download that failed or arrived broken
│   ├── FamilyError       an architecture with no row in the family table, or with a wrong one
│   └── CheckpointError   a missing, truncated, foreign or unsafe checkpoint
├── DataError         training or evaluation data, or a task, that cannot be understood
├── RecipeError       a training recipe with an unknown key or a wrong value
├── TrainingError     a training run that cannot go on: NaN loss, full disk, foreign state
├── ResultError       a record that cannot be written or read
└── ServingError      a server that cannot be started as it was asked

Each message says what is wrong, what was expected, what was got, and what to do. All of them are
`ValueError`s, so that code which knows nothing of Buddy can catch them.
"""


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it: on one line, and not all of a long one."""
    if value is None:
        return "null"
    try:
        # What is cut off need not be written: lists may be huge.
        text = repr(value[:most] if isinstance(value, list | tuple | str) else value)
    except (RecursionError, ValueError):  # nests too deeply; an integer of thousands of digits
        return f"a very long {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def reason(error: BaseException) -> str:
    """What an error of another library says, on one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_failure(error: BaseException) -> bool:
    """Whether some code has failed, by a panic of Rust's too, and nobody stops the program."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had; torch says it in words."""
    words = ("allocate memory", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def one_line(text: str) -> str:
    """The text without what would break the line: spaces stand for it; or steer a terminal."""
    return "".join(
        char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1]
        for char in text
    )


class BuddyError(ValueError):
    """Base of every error that Buddy raises on purpose."""

    def __str__(self) -> str:
        """The message on one line, whatever the names in it are that a file or a user gave."""
        return one_line(super().__str__())


class BudgetError(BuddyError):
    """A budget that cannot be parsed, or that the model cannot spend."""


class PolicyError(BuddyError):
    """An unknown policy, or one that cannot serve this model."""


class PromptError(BuddyError):
    """A prompt with no tokens, or with more than the context holds."""


class ModelError(BuddyError):
    """A model that cannot be found, fetched or understood."""


class FetchError(ModelError):
    """A download that failed or arrived broken."""


class FamilyError(ModelError):
    """An architecture that has no row in the family table, or whose row is wrong."""


class CheckpointError(ModelError):
    """A missing, truncated, foreign or unsafe checkpoint."""


class DataError(BuddyError):
    """Training or evaluation data, or a task, that cannot be found or understood."""


class RecipeError(BuddyError):
    """A training recipe with an unknown key or a wrong value."""


class TrainingError(BuddyError):
    """A training run that cannot go on: a NaN loss, a full disk, a state of another run."""


class ResultError(BuddyError):
    """A record that cannot be written or read."""


class ServingError(BuddyError):
    """A server that cannot be started as it was asked."""
