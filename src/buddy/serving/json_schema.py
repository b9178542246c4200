"""JSON schemas as llguidance follows them: without space but where JSON needs it."""

from typing import Any


def source_of(schema: Any) -> str:
    """The grammar of texts that follow a schema.

    Raises:
        ValueError: It is no schema.
        TypeError: It is no schema.
    """
    from llguidance import LLMatcher

    options: Any = {"whitespace_flexible": False}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def can_follow(schema: Any) -> bool:
    """Whether a text can be made to follow a schema."""
    from llguidance import LLMatcher

    try:
        return not LLMatcher.validate_grammar(source_of(schema))
    except (ValueError, TypeError):
        return False
