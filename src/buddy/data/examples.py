"""Examples: a prompt and the answer to it, as tokens. Two kinds of rows are understood."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar, get_args, runtime_checkable

from buddy.data.chat import apply_chat
from buddy.data.mix import MIX, mix_path
from buddy.data.rows import Note, Row, read_rows, refused
from buddy.data.tokens import encode, end_of_turn
from buddy.errors import DataError, reason, shown
from buddy.files import check_readable
from buddy.settings import Range, check_ranges

Made = TypeVar("Made")


@runtime_checkable
class _Sourced(Protocol):
    @property
    def source(self) -> str: ...


Sourced = TypeVar("Sourced", bound=_Sourced)
Template = Literal["chat", "alpaca"]
"""How an instruction is put to the model: its own chat template, or that of Stanford Alpaca."""

_ALPACA: Final = (
    "Below is an instruction that describes a task{with_input}. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "{input}### Response:\n"
)
_KINDS: Final = (("instruction", "output"), ("prompt", "completion"))
_KINDS_TEXT: Final = "instruction and output (input may be added), or prompt and completion"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer.

    Attributes:
        prompt: Token ids, at least one.
        answer: Token ids that follow, at least one.
        source: Name of the file or data set that it comes from.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    source: str

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where examples come from.

    Raises:
        DataError: An unknown setting, or none or both of `path` and `hub`.
    """

    path: str | None = None
    """A JSON or JSON-lines file; `shipped:mix` is the mix of kinds that ships with Buddy."""
    hub: str | None = None
    """A data set's id on the hub."""
    split: str = "train"
    """Part of the hub data set."""
    start: Annotated[int, Range(0, 10**12)] = 0
    """First row that is taken."""
    stop: Annotated[int, Range(1, 10**12)] | None = None
    """First row that is not; None = to the end."""
    repeat: Annotated[int, Range(1, 1000)] = 1
    """How often each row appears in one epoch."""
    template: Template = "chat"
    """How an instruction is put; rows with prompt and completion are taken word for word."""

    def __post_init__(self) -> None:
        check_ranges(self, DataError)
        if (self.path is None) == (self.hub is None):
            raise DataError("a data source needs either path (a file) or hub (a data set's id)")
        if self.template not in get_args(Template):
            raise DataError(
                f"template must be one of {', '.join(get_args(Template))}, got {self.template!r}"
            )
        if self.stop is not None and self.stop <= self.start:
            raise DataError(f"stop must be above start, {self.start}, got {self.stop}")

    @property
    def file(self) -> Path | None:
        """The file; None where the rows are a hub data set's."""
        if self.path is None:
            return None
        return mix_path() if self.path == MIX else Path(self.path)

    @property
    def name(self) -> str:
        """Short name, for logs: the file's folder and stem, or the data set's id."""
        if self.path is None:
            return str(self.hub)
        path = Path(self.path)
        return f"{path.parent.name}/{path.stem}" if path.parent.name else path.stem


def check_source(source: Source) -> None:
    """Refuse a source that cannot be read, before the work that it is for.

    Raises:
        DataError: There is no such file, or the package for data sets of the hub is missing.
    """
    if source.file is not None:
        check_readable(source.file, DataError)
    else:
        _need_datasets()


def read_examples(
    source: Source, tokenizer: Any, *, max_tokens: int, note: Note = lambda text: None
) -> list[Example]:
    """The examples of a source, in its order; each row once.

    An example longer than `max_tokens` loses the end of its answer. A row whose prompt alone is as
    long, or whose prompt or answer is empty, gives none.

    Args:
        source: File or hub data set.
        tokenizer: Of the model.
        max_tokens: Of prompt and answer together.
        note: Told of rows that give no example.

    Raises:
        DataError: Rows are missing, malformed or of no kind that is understood, or none is left.
    """
    encode_row = encoder(source.template, tokenizer)

    def read(where: str, row: Row) -> Example | str:
        prompt, answer = encode_row(row, where)
        if not answer:
            return "an empty answer"
        if not prompt:
            return "an empty prompt"
        if len(prompt) >= max_tokens:
            return f"a prompt of {max_tokens} tokens or more"
        answer = answer[: max_tokens - len(prompt)]
        return Example(tuple(prompt), tuple(answer), row_source(row, where, source))

    return usable_rows(source, read, note)


def usable_rows(source: Source, read: Callable[[str, Row], Made | str], note: Note) -> list[Made]:
    """What the rows of a source give, in its order; each row once.

    Args:
        source: File or hub data set.
        read: Takes where a row stands, as a message begins, and the row; what the row gives, or
            what it has that makes it give nothing.
        note: Told of rows that give nothing.

    Raises:
        DataError: Rows are missing, or none gives anything.
    """
    rows = load_rows(source)[source.start : source.stop]
    usable, left_out = list[Made](), Counter[str]()
    for where, row in rows:
        item = read(where, row)
        if isinstance(item, str):
            left_out[item] += 1
        else:
            usable.append(item)
    name = source.path or source.hub
    reasons = ", ".join(f"{count} with {reason}" for reason, count in left_out.items())
    if not usable:
        raise DataError(
            f"{name} has no usable row from {source.start} to {source.stop or 'its end'}: "
            f"{reasons or 'it ends before'}"
        )
    if left_out:
        note(f"{name}: of {len(rows)} rows, {reasons} left out")
    return usable


def row_source(row: Row, where: str, source: Source) -> str:
    """What a row names as its source; else the name of the file or data set.

    Raises:
        DataError: It names something else than a text.
    """
    name = row.get("source")
    if not isinstance(name, str | None):
        raise refused(where, "source", "a text", name)
    return name or source.name


def load_rows(source: Source) -> list[tuple[str, Row]]:
    """All rows of a source, and where each stands, as a message begins.

    Raises:
        DataError: The file or the data set cannot be read.
    """
    if source.file is not None:
        return read_rows(source.file)
    load_dataset = _need_datasets()
    from datasets.exceptions import DatasetsError

    try:
        rows = list(load_dataset(source.hub, split=source.split))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"split {source.split!r} of {source.hub} cannot be had from the hub: {reason(error)}; "
            "give a file by path"
        ) from error
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"split {source.split!r} of {source.hub} has no rows of fields")
    return [(f"{source.hub}, row {number},", row) for number, row in enumerate(rows, start=1)]


def _need_datasets() -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            'hub data sets need the datasets package: pip install "buddy-llm[train]", or give a '
            "file by path"
        ) from error
    return load_dataset


Encode = Callable[[Row, str], tuple[list[int], list[int]]]


def encoder(template: Template, tokenizer: Any) -> Encode:
    """A function from a row, and where it stands, to the tokens of its prompt and answer.

    It raises a `DataError` for a row of no kind that is understood.
    """
    end = cache(lambda: _end(tokenizer, template))

    def encode_row(row: Row, where: str) -> tuple[list[int], list[int]]:
        fields = next((kind for kind in _KINDS if set(kind) <= row.keys()), None)
        if fields is None:
            names = shown(", ".join(row))[1:-1] or "none"
            raise DataError(f"{where} has the fields {names}: expected {_KINDS_TEXT}")
        for name in fields:
            if not isinstance(row[name], str):
                raise refused(where, name, "a text", row[name])
        if not isinstance(row.get("input"), str | None):
            raise refused(where, "input", "a text", row["input"])
        if not row[fields[1]].strip():
            return [], []
        if fields == ("prompt", "completion"):
            return _split(tokenizer, row["prompt"], row["completion"])
        return instruct(row["instruction"], row.get("input") or "", row["output"])

    def instruct(instruction: str, extra: str, output: str) -> tuple[list[int], list[int]]:
        if template == "alpaca":
            text = _ALPACA.format(
                instruction=instruction,
                input=f"### Input:\n{extra}\n\n" if extra else "",
                with_input=", paired with an input that provides further context" if extra else "",
            )
            prompt = encode(tokenizer, text)
        else:
            prompt = encode_chat(tokenizer, f"{instruction}\n\n{extra}" if extra else instruction)
        answer = tokenizer(output, add_special_tokens=False, verbose=False)["input_ids"]
        return prompt, [*answer, *end()]

    return encode_row


def encode_chat(tokenizer: Any, request: str, **variables: Any) -> list[int]:
    """A user's request in the model's chat template, ready for the answer.

    Args:
        tokenizer: Of the model.
        request: What the user asks.
        **variables: Of the template.

    Raises:
        DataError: The tokenizer has no chat template.
        PromptError: The template fails.
    """
    if tokenizer.chat_template is None:
        raise DataError('this model has no chat template: set template = "alpaca"')
    text = apply_chat(
        tokenizer,
        [{"role": "user", "content": request}],
        tokenize=False,
        **variables,
    )
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _end(tokenizer: Any, template: Template) -> list[int]:
    """What ends an answer: in the model's own template the end of a turn, else that of a text."""
    end = end_of_turn(tokenizer) if template == "chat" else None
    end = tokenizer.eos_token_id if end is None else end
    return [] if end is None else [int(end)]


def _split(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Tokens as they are when the text is read whole, as evaluation reads it."""
    before, whole = encode(tokenizer, prompt), encode(tokenizer, prompt + completion)
    if whole[: len(before)] != before:
        alone = tokenizer(completion, add_special_tokens=False, verbose=False)
        return before, list(alone["input_ids"])
    return before, whole[len(before) :]


def by_source(rows: Iterable[Sourced]) -> dict[str, list[Sourced]]:
    """Rows by the source that they name, in the order of the first of each."""
    found: dict[str, list[Sourced]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row)
    return found


def read_all(
    sources: Iterable[Source], tokenizer: Any, *, max_tokens: int, note: Note = lambda text: None
) -> list[Example]:
    """The examples of several sources, each repeated as often as it says."""
    return [
        example
        for source in sources
        for example in read_examples(source, tokenizer, max_tokens=max_tokens, note=note)
        * source.repeat
    ]
