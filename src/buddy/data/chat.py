"""Renders chat templates: Jinja programs that come with a model, run in transformers' sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any

from buddy.errors import PromptError, is_failure

_MOST = 400


def apply_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **options: Any) -> Any:
    """A conversation in the model's chat template, by default ready for the answer.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        messages: The conversation, each with `role` and `content`.
        **options: As transformers' `apply_chat_template` takes them, or the template. A model that
            may think aloud first does not, unless `enable_thinking` says so: prompts are the same
            in training, evaluation and use.

    Raises:
        PromptError: The template is no Jinja, or refuses the conversation.
    """
    options = {"enable_thinking": False, "add_generation_prompt": True, **options}
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    # The template is a program of somebody else's, so it can raise whatever Python can.
    except BaseException as error:
        if not is_failure(error):
            raise
        why = " ".join(str(error).split())[:_MOST] or "nothing more"
        raise PromptError(
            f"the chat template of {tokenizer.name_or_path} fails: {type(error).__name__}: {why}; "
            "correct chat_template.jinja or tokenizer_config.json there, or use no template "
            "(buddy generate --raw)"
        ) from error
