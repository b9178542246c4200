"""What an evaluation is told of a model's thinking: its limit, and variables of its template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buddy.cli.template_option import check_template

if TYPE_CHECKING:
    from buddy.model import BuddyForCausalLM


@dataclass(frozen=True, slots=True)
class Thinking:
    """How long a model may think, and how its chat template writes prompts.

    Attributes:
        tokens: Most tokens of thinking; None = any number.
        variables: Of the chat template, by name.
    """

    tokens: int | None
    variables: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """Settings for a record; none where nothing is said, so that earlier logs go on."""
        config = {"thinking_tokens": self.tokens, "template_options": dict(self.variables)}
        return {name: value for name, value in config.items() if value not in (None, {})}

    def check(self, outline: "BuddyForCausalLM", model: str) -> None:
        """Refuse what the model would not obey, before its weights are fetched.

        Args:
            outline: The model without weights.
            model: Its name.

        Raises:
            BuddyError: It does not think, or its template lacks a variable.
        """
        from buddy.budget.thinking import read_thinking_tokens
        from buddy.checkpoint.resolve import load_tokenizer

        if self.tokens is not None:
            read_thinking_tokens(self.tokens, outline.thinking_marks)
        if self.variables:
            check_template(load_tokenizer(model), self.variables)

    def end(self, model: "BuddyForCausalLM") -> int | None:
        """The token that ends thinking, where it may come; what follows it is the answer."""
        if self.tokens is None and not self.variables:
            return None
        marks = model.thinking_marks
        return None if marks is None else marks.close_token
