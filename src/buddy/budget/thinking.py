"""Thinking aloud: the marks that a family writes around it, and a limit to its length."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from buddy.errors import PolicyError

_SPACE: Final = 4
"""Tokens after the closing mark of a prompt that may be space."""
_PAIRS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
_SENTENCE_ENDS: Final = tuple(".!?\u2026\u3002\uff01\uff1f")
_AFTER_END: Final = " \t\"')]*_`\u2019\u201d\u00bb\u300d"
"""What may stand after the end of a sentence and before the next."""
_MOST_EARLY: Final = 64


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks of a family around its thinking, and the tokens that a thought may end with.

    Attributes:
        opens: Text before it.
        closes: Text after it.
        open_token: The token of the first.
        close_token: The token of the second.
        breaks: Tokens that end a sentence or a line.
    """

    opens: str
    closes: str
    open_token: int
    close_token: int
    breaks: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> "ThinkingMarks | None":
        """The marks that a tokenizer's chat template has, each a token; None where it has none."""
        for opens, closes in _PAIRS:
            if closes not in str(tokenizer.chat_template):
                continue
            ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (opens, closes)]
            if all(len(tokens) == 1 for tokens in ids):
                return cls(opens, closes, ids[0][0], ids[1][0], _breaks(tokenizer))
        return None

    def are_thought(self, tokens: Sequence[int], *, is_open: bool) -> list[bool]:
        """Whether each token is one of thinking: the opening mark is, the closing one is not.

        Args:
            tokens: In their order.
            is_open: Whether thinking goes on before the first.
        """
        thought = []
        for token in tokens:
            is_open = token == self.open_token or (is_open and token != self.close_token)
            thought.append(is_open)
        return thought

    def is_open(self, tokens: Sequence[int], *, before: bool = False) -> bool:
        """Whether thinking goes on after tokens, such as a prompt.

        Args:
            tokens: In their order.
            before: Whether it goes on before the first.
        """
        for token in reversed(tokens):
            if token in (self.open_token, self.close_token):
                return token == self.open_token
        return before

    def is_closed(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with thinking that is over: the answer has none of its own."""
        return self.close_token in prompt[-_SPACE:]


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """The most tokens that an answer may think for, its marks not counted.

    Thinking ends with the closing mark at the limit. It ends earlier where a sentence or a line
    does in the last quarter of the limit, of which at most the last 64 tokens count.

    Attributes:
        marks: Around the thinking.
        tokens: 0 = none: thinking that is open is closed at once.
    """

    marks: ThinkingMarks
    tokens: int

    @property
    def early(self) -> int:
        """Tokens from which on the end of a sentence or of a line ends it."""
        return self.tokens - min(self.tokens // 4, _MOST_EARLY)


@dataclass(frozen=True, slots=True)
class ThinkingWatch:
    """How long one answer has thought, and whether its thinking is to end now.

    Attributes:
        limit: Of its thinking, all together.
        is_open: Whether thinking goes on; at first, whether the prompt ends within it.
        thought: Tokens of thinking so far.
        is_at_break: Whether the last of them ends a sentence or a line.
    """

    limit: ThinkingLimit
    is_open: bool
    thought: int = 0
    is_at_break: bool = False

    def after(self, token: int) -> "ThinkingWatch":
        """The same, one token on."""
        marks = self.limit.marks
        if not self.is_open or token == marks.close_token:
            return ThinkingWatch(self.limit, token == marks.open_token, self.thought)
        # A mark that opens what is open counts: it could be repeated without end.
        return ThinkingWatch(self.limit, True, self.thought + 1, token in marks.breaks)

    @property
    def closes(self) -> int | None:
        """The closing mark, where it must be the next token; else None."""
        at = self.limit.early if self.is_at_break else self.limit.tokens
        is_due = self.is_open and self.thought >= at
        return self.limit.marks.close_token if is_due else None


def read_thinking_tokens(tokens: Any, marks: ThinkingMarks | None) -> ThinkingLimit:
    """A limit of thinking as a caller writes it.

    Raises:
        PolicyError: It is no number of tokens, or the model does not think.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise PolicyError(
            f"thinking_tokens must be a whole number of tokens of at least 0, got {tokens!r}"
        )
    if marks is None:
        raise PolicyError(
            "thinking_tokens ends thinking with its closing mark, such as </think>, and this "
            "model's chat template has none: leave it out"
        )
    return ThinkingLimit(marks, tokens)


def _breaks(tokenizer: Any) -> frozenset[int]:
    """Tokens whose text has the end of a line, or ends as a sentence does."""
    ids = list(tokenizer.get_vocab().values())
    texts = tokenizer.backend_tokenizer.decode_batch([[token] for token in ids])
    return frozenset(
        token
        for token, text in zip(ids, texts, strict=True)
        if "\n" in text or text.rstrip(_AFTER_END).endswith(_SENTENCE_ENDS)
    )
