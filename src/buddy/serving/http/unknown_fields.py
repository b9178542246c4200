"""Fields of requests that this server does not know: refused by name, or ignored and named.

A field that changes an answer elsewhere (another path of this server, Buddy in Python, OpenAI's
API, vLLM, SGLang, llama.cpp, Ollama) must not be ignored in silence, so it is refused unless its
value asks for nothing. So is one that is written nearly as a field that is known. Any other is
ignored, and the answer's header names it.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Final

from pydantic import BaseModel

from buddy.errors import shown
from buddy.serving.http.bodies import ChatBody, CompletionBody
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.responses import ResponsesBody

HEADER: Final = "X-Buddy-Ignored"
"""Names the fields of a request that were ignored."""
_MOST_UNKNOWN: Final = 64
_MOST_NAMED: Final = 16
_LONGEST_NAME: Final = 64
_LIKE: Final = 0.85
"""How alike two names are of which one is taken for a slip: difflib's ratio."""

_FORMAT: Final = "use text.format in /v1/responses, and response_format elsewhere"
_TOKENS: Final = "use max_output_tokens in /v1/responses, and max_tokens elsewhere"
_PENALTY: Final = "use repetition_penalty"
_THINKING: Final = "use chat_template_kwargs, as the model's template has it"
_INSTEAD: Final = {
    **dict.fromkeys(("guided_json", "json_schema", "structured_outputs", "format"), _FORMAT),
    **dict.fromkeys(("response_format", "text"), _FORMAT),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), _TOKENS),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _TOKENS),
    **dict.fromkeys(("min_new_tokens",), "use min_tokens"),
    **dict.fromkeys(("repeat_penalty",), _PENALTY),
    **dict.fromkeys(("think", "thinking", "enable_thinking"), _THINKING),
    **dict.fromkeys(
        ("reasoning", "reasoning_effort"),
        "use reasoning.effort in /v1/responses, and reasoning_effort elsewhere",
    ),
    "draft_budget": "use drafts",
    "prefill_budget": 'use budget, as in "prompt:1.0,answer:0.6"',
    "include_depth": "use stream_options.include_depth, which /v1/responses does not have",
    "extra_body": "send what it holds as fields of the request",
    **dict.fromkeys(
        ("thinking_token_budget", "thinking_budget", "reasoning_budget"), "use thinking_tokens"
    ),
}
"""Others' names of what this server does by another."""
_NOT_DONE: Final = frozenset(
    {
        # Which tokens may be drawn, and how.
        *("allowed_token_ids", "bad_words", "logits_processors", "typical_p", "tfs_z", "top_a"),
        *("top_n_sigma", "xtc_probability", "mirostat", "dry_multiplier", "dynatemp_range"),
        *(
            "samplers",
            "no_repeat_ngram_size",
            "guidance_scale",
            "negative_prompt",
            "use_beam_search",
        ),
        *("length_penalty", "early_stopping", "penalty_alpha", "repeat_last_n", "stop_regex"),
        *("eta_cutoff", "epsilon_cutoff", "smoothing_factor", "logit_bias_exp", "top_p_decay"),
        *("guided_regex", "guided_choice", "guided_grammar", "grammar", "regex", "ebnf"),
        "structural_tag",
        *("num_beams", "num_return_sequences", "kv_policy", "policy", "reroute", "batch_route"),
        # What the model is asked.
        *("documents", "chat_template", "truncate_prompt_tokens", "prompt_embeds", "images"),
        *("mm_processor_kwargs", "lora", "lora_path", "adapter", "adapters", "system", "context"),
        *("raw", "template", "options", "input_extra", "n_keep", "n_discard", "num_ctx"),
        *("web_search_options", "verbosity", "function_call", "audio", "input_audio"),
        # What comes back.
        *("include_stop_str_in_output", "spaces_between_special_tokens", "n_probs"),
        *("return_token_ids", "return_tokens_as_token_ids", "post_sampling_probs"),
        *("echo", "prompt_logprobs", "include_reasoning", "separate_reasoning", "reasoning_format"),
        *("logprob_token_ids", "return_hidden_states", "use_audio_in_video", "top_logprobs_num"),
    }
)
_ELSEWHERE: Final = frozenset({*_NOT_DONE, *_INSTEAD})
_ANSWERED: Final = (ChatBody, CompletionBody, ResponsesBody)
_CHANGES_NOTHING: Final = frozenset(
    {"stream_options", "store", "background", "include", "parallel_tool_calls", "truncation"}
)
_ELSEWHERE_ANSWERED: Final = (
    _ELSEWHERE.union(*(body.model_fields for body in _ANSWERED)) - _CHANGES_NOTHING
)
"""These, and what another path that answers knows."""
_NEUTRAL: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("typical_p", "tfs_z", "repeat_penalty", "length_penalty", "guidance_scale"), 1
    ),
    **dict.fromkeys(("spaces_between_special_tokens", "include_reasoning"), True),
    **dict.fromkeys(("separate_reasoning",), True),
    **dict.fromkeys(("top_n_sigma", "n_keep", "repeat_last_n"), -1),
    **dict.fromkeys(("verbosity",), "medium"),
    **dict.fromkeys(("n", "best_of", "num_beams", "num_return_sequences"), 1),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), True),
    "repetition_penalty": 1,
    "top_k": -1,
    "tool_choice": "none",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
}
"""Values that ask for nothing, beside null, false, zero and what is empty."""


def check_unknown(body: BaseModel) -> tuple[str, ...]:
    """Names of the fields that are ignored, such as `metadata` or `messages.cache_control`.

    Args:
        body: A request, as it was read; its models keep the fields that they do not know.

    Raises:
        Refusal: One would change the answer elsewhere, or is nearly a field that is known.
    """
    known, extra = type(body).model_fields, body.model_extra or {}
    elsewhere = _ELSEWHERE_ANSWERED if isinstance(body, _ANSWERED) else _ELSEWHERE
    if len(extra) > _MOST_UNKNOWN:
        raise Refusal(
            400,
            f"{len(extra)} fields are not known here: expected {_MOST_UNKNOWN} at most",
            param=_written(next(iter(extra))),
            code="unknown_field",
        )
    for name, value in extra.items():
        if name in elsewhere:
            if value and value != _NEUTRAL.get(name):
                why = _INSTEAD.get(name, "leave it out")
                raise Refusal(
                    400,
                    f"{name} is not supported here: {why}",
                    param=name,
                    code="unsupported",
                )
        elif close := get_close_matches(name[:_LONGEST_NAME], known, 1, _LIKE):
            raise Refusal(
                400,
                f"there is no field {shown(name)}: did you mean {close[0]}?",
                param=_written(name),
                code="unknown_field",
            )
    return tuple(dict.fromkeys(_unknown(body, "", elsewhere)))


def header_of(ignored: tuple[str, ...]) -> dict[str, str]:
    """The header that names ignored fields; none where there are none."""
    if not ignored:
        return {}
    names = [_written(name) for name in ignored[:_MOST_NAMED]]
    more = len(ignored) - len(names)
    return {HEADER: ", ".join(names) + (f", and {more} more" if more else "")}


def _unknown(model: BaseModel, place: str, elsewhere: frozenset[str]) -> Iterator[str]:
    for name, value in (model.model_extra or {}).items():
        if value is not None and (place or name not in elsewhere):
            yield place + name
    for name in model.model_fields_set & type(model).model_fields.keys():
        value = getattr(model, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel):
                yield from _unknown(item, f"{place}{name}.", elsewhere)


def _written(name: str) -> str:
    """A client's name for a field as a header can have it."""
    plain = name.isascii() and name.isprintable() and "," not in name
    ends_in_space = name.strip() != name  # as no header may
    return (
        name
        if plain and not ends_in_space and 0 < len(name) <= _LONGEST_NAME
        else ascii(name[:_LONGEST_NAME]).replace(",", "?")
    )
