"""Text under a grammar: which tokens may follow, so that the text is JSON, or JSON of a schema."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from buddy.errors import reason
from buddy.serving.json_schema import source_of
from buddy.serving.request import Grammar, GrammarError, Thought


class GrammarMaker:
    """Compiles grammars for a tokenizer.

    Args:
        tokenizer: Of the tokenizers library, as transformers wraps it.
        vocab: Logits of a token; may be more than the tokenizer's tokens.
        ends: Tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocab: int, ends: Sequence[int]) -> None:
        self._tokenizer, self.vocab = tokenizer, vocab
        self._ends = list(ends) or [tokenizer.eos_token_id]
        self._made: Any = None
        self._lock = Lock()

    def prepare(self) -> None:
        """Do now what takes a while, where it can be done; what cannot is said by `compile`."""
        if find_spec("llguidance") is not None:
            with suppress(GrammarError):
                self._guide()

    def compile(self, grammar: Grammar) -> "GrammarState":
        """A text that is to be begun.

        Raises:
            GrammarError: It is no JSON, no schema, or one with parts that are not supported; or
                the tokenizer cannot be read.
        """
        try:
            state = GrammarState(self._matcher(grammar), self.vocab, grammar.param)
            try:
                state.forbidden()  # a schema without end is found out here, and not by an answer
            except GrammarError as error:
                raise GrammarError(f"the schema cannot be followed: {error}") from error
        except GrammarError as error:
            error.param = grammar.param
            raise
        if grammar.after is not None:
            state.let_think(grammar.after, self._ends)
        return state

    def _matcher(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise GrammarError(
                f"{grammar.param} needs the package llguidance, which is not installed: "
                'pip install "buddy-llm[serve]"'
            ) from error
        schema: Any = {"type": "object"}
        if grammar.schema is not None:
            try:
                schema = json.loads(grammar.schema)
            except ValueError as error:
                raise GrammarError(f"the schema is no JSON: {reason(error)}") from error
        try:
            source = grammar.lark or source_of(schema)
        except (ValueError, TypeError) as error:
            raise GrammarError(f"the schema cannot be followed: {reason(error)}") from error
        matcher = LLMatcher(self._guide(), source, log_level=0)
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())[:400] or "no reason"
            raise GrammarError(f"the schema cannot be followed: {why}")
        return matcher

    def _guide(self) -> Any:
        """The tokenizer as the library wants it; made once, which takes a while."""
        with self._lock:
            if self._made is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._made = from_tokenizer(self._tokenizer, self.vocab, eos_token=self._ends)
                except (ValueError, TypeError) as error:
                    raise GrammarError(
                        "no grammar can be followed with this model's tokenizer: "
                        f"{reason(error)}; leave it out"
                    ) from error
            return self._made


class GrammarState:
    """How far one text has come in its grammar.

    Args:
        matcher: Of the library.
        vocab: Logits of a token.
        param: The field of the request that asked for the grammar.
    """

    def __init__(self, matcher: Any, vocab: int, param: str) -> None:
        self._matcher, self._vocab, self.param = matcher, vocab, param
        self._bits = torch.zeros((vocab + 31) // 32, dtype=torch.int32)
        self._thought: Thought | None = None
        """Thinking that may begin, or has."""
        self._ends: Sequence[int] = ()

    def let_think(self, thought: Thought, ends: Sequence[int]) -> None:
        """Begin after thinking, in which all may follow but the ends of a text."""
        self._thought, self._ends = thought, ends

    def forbidden(self) -> Bool[Tensor, " vocab"]:
        """Tokens that may not follow.

        Raises:
            GrammarError: The grammar became too complex, or nothing may follow.
        """
        thought = self._thought
        if thought is not None and thought.is_open:
            ends = torch.zeros(self._vocab, dtype=torch.bool)
            ends[list(self._ends)] = True
            return ends
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), 4 * len(bits))
        if self._matcher.is_error():
            raise GrammarError(f"the text cannot go on under its grammar: {self._why()}")
        allowed = (bits[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        forbidden = allowed.flatten()[: self._vocab] == 0
        if thought is not None:
            forbidden[thought.open_token] = False
        return forbidden

    def take(self, token: int) -> None:
        """Go on with a token.

        Raises:
            GrammarError: The grammar does not allow it.
        """
        thought = self._thought
        if thought is not None and (thought.is_open or token == thought.open_token):
            is_over = thought.is_open and token == thought.close_token
            self._thought = None if is_over else replace(thought, is_open=True)
            return
        self._thought = None
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} is not allowed by the grammar: {self._why()}")

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thought, and no text of the grammar."""
        return self._thought is not None and self._thought.is_open

    def _why(self) -> str:
        """The first line: what follows is the state of the library, with the text in it."""
        lines: list[str] = self._matcher.get_error().strip().splitlines()
        return lines[0][:400] if lines else "no reason"

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._thought is None and bool(self._matcher.is_stopped())
