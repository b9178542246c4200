"""Examples: a prompt and the answer to it, as tokens. Two kinds of rows are understood."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from buddy.data.rows import Row, read_rows
from buddy.errors import DataError
from buddy.files import check_readable

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
    """A JSON or JSON-lines file."""
    hub: str | None = None
    """A data set's id on the hub."""
    split: str = "train"
    """Of the hub data set."""
    start: int = 0
    """First row that is taken."""
    stop: int | None = None
    """First row that is not; None = to the end."""
    repeat: int = 1
    """How often each row appears in one epoch."""
    template: Template = "chat"
    """How an instruction is put; rows with prompt and completion are taken word for word."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hub is None):
            raise DataError("a data source needs either path (a file) or hub (a data set's id)")
        if self.template not in get_args(Template):
            raise DataError(
                f"template must be one of {', '.join(get_args(Template))}, got {self.template!r}"
            )
        if self.repeat < 1 or self.start < 0:
            raise DataError("repeat must be at least 1, and start at least 0")

    @property
    def name(self) -> str:
        """Short name, for logs: the file's folder and stem, or the data set's id."""
        if self.path is None:
            return str(self.hub)
        path = Path(self.path)
        return f"{path.parent.name}/{path.stem}" if path.parent.name else path.stem


def check_source(source: Source) -> None:
    """Refuse a file that cannot be read, before the work that it is for.

    Raises:
        DataError: There is none, or it cannot be opened.
    """
    if source.path is not None:
        check_readable(_path(source.path), DataError)


def _path(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~NAME, of somebody who has no home here
        raise DataError(f"{path} cannot be read: {error}") from error


def read_examples(source: Source, tokenizer: Any, *, max_tokens: int) -> list[Example]:
    """The examples of a source, in its order; each row once.

    An example longer than `max_tokens` loses the end of its answer; one whose prompt alone is as
    long is left out.

    Args:
        source: File or hub data set.
        tokenizer: Of the model.
        max_tokens: Of prompt and answer together.

    Raises:
        DataError: Rows are missing, malformed or of no kind that is understood, or none is left.
    """
    rows = _load(source)[source.start : source.stop]
    encode = _encoder(source.template, tokenizer)
    examples = []
    for number, row in enumerate(rows, start=source.start + 1):
        where = f"{source.path or source.hub}, row {number},"
        prompt, answer = encode(row, where)
        answer = answer[: max_tokens - len(prompt)] if len(prompt) < max_tokens else []
        if prompt and answer:
            examples.append(Example(tuple(prompt), tuple(answer), _row_source(row, source)))
    if not examples:
        raise DataError(
            f"{source.path or source.hub} has no usable row from {source.start} to "
            f"{source.stop or 'its end'}: expected answers, and prompts of fewer than "
            f"{max_tokens} tokens"
        )
    return examples


def _row_source(row: Row, source: Source) -> str:
    name = row.get("source")
    return name if isinstance(name, str) else source.name


def _load(source: Source) -> list[Row]:
    if source.path is not None:
        return read_rows(_path(source.path))
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            'hub data sets need the datasets package: pip install "buddy-llm[train]", or give a '
            "file by path"
        ) from error
    try:
        return list(load_dataset(source.hub, split=source.split))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"split {source.split!r} of {source.hub} cannot be had from the hub: {error}; give a "
            "file by path"
        ) from error


Encode = Callable[[Row, str], tuple[list[int], list[int]]]


def _encoder(template: Template, tokenizer: Any) -> Encode:
    """A function from a row to the tokens of its prompt and answer."""

    def encode(row: Row, where: str) -> tuple[list[int], list[int]]:
        fields = next((kind for kind in _KINDS if set(kind) <= row.keys()), None)
        if fields is None:
            raise DataError(f"{where} has the fields {', '.join(row)}: expected {_KINDS_TEXT}")
        for name in (*fields, "input"):
            if not isinstance(row.get(name, ""), str | None):
                raise DataError(f"{where} field {name}: expected a text, got {row[name]!r}")
        if fields == ("prompt", "completion"):
            return _split(tokenizer, row["prompt"], row["completion"])
        return instruct(row["instruction"], row.get("input") or "", row["output"])

    def instruct(instruction: str, given: str, output: str) -> tuple[list[int], list[int]]:
        if template == "alpaca":
            text = _ALPACA.format(
                instruction=instruction,
                input=f"### Input:\n{given}\n\n" if given else "",
                with_input=", paired with an input that provides further context" if given else "",
            )
            prompt = list(tokenizer(text)["input_ids"])
        else:
            prompt = encode_chat(tokenizer, f"{instruction}\n\n{given}" if given else instruction)
        answer = tokenizer(output, add_special_tokens=False)["input_ids"]
        return prompt, [*answer, *_end(tokenizer)] if output else []

    return encode


def encode_chat(tokenizer: Any, request: str) -> list[int]:
    """A user's request in the model's chat template, ready for the answer.

    Raises:
        DataError: The tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise DataError('this model has no chat template: set template = "alpaca"')
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _split(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Tokens as they are when the text is read whole, as evaluation reads it."""
    before = list(tokenizer(prompt)["input_ids"])
    whole = list(tokenizer(prompt + completion)["input_ids"])
    if whole[: len(before)] != before:
        return before, list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    return before, whole[len(before) :]


def read_all(sources: Iterable[Source], tokenizer: Any, *, max_tokens: int) -> list[Example]:
    """The examples of several sources, each repeated as often as it says."""
    return [
        example
        for source in sources
        for example in read_examples(source, tokenizer, max_tokens=max_tokens) * source.repeat
    ]
