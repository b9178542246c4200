"""A body that pydantic has read becomes the requests that the engine takes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from buddy.budget.resolved import ResolvedBudget
from buddy.budget.thinking import ThinkingLimit, read_thinking_tokens
from buddy.errors import BudgetError, PolicyError, PromptError, shown
from buddy.serving.http.bodies import ChatBody, CompletionBody, RequestFields
from buddy.serving.http.budget_rules import BudgetRules, split_model
from buddy.serving.http.draft_rules import drafts_of
from buddy.serving.http.echo import scored_top
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.refusals import Refusal, refusal_of
from buddy.serving.http.service import Service
from buddy.serving.http.speech import Speech
from buddy.serving.http.tool_choice import (
    called_tools,
    chat_grammar,
    conversation,
    shown_marks,
    speech_of,
)
from buddy.serving.request import GenerationRequest, Grammar, Sampling, Thought

_COMPLETION_TOKENS: Final = 16
"""Length of a completion that names none, as OpenAI has it; a chat may fill the context."""
_SAMPLED: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Numbers that bodies and `Sampling` name alike."""
_ENDS_WHOLE: Final = (
    "min_tokens goes with neither response_format nor tools: such an answer ends where it is whole"
)
_MOST_REQUESTS: Final = 128
"""Prompts times answers to each."""


def budget_of(body: RequestFields, rules: BudgetRules, served: str) -> ResolvedBudget:
    """The budget of a request.

    Raises:
        Refusal: The model is not served, or the budget cannot be read or spent.
    """
    model, suffix = (served, None) if body.model is None else split_model(body.model, served)
    if model != served:
        raise Refusal(
            404,
            f"model {shown(model)} is not served here: expected {served}, or with a budget "
            f"{served}@0.6",
            param="model",
            code="model_not_found",
        )
    try:
        return rules.read(body.budget, suffix, body.reasoning_effort)
    except BudgetError as error:
        param = "budget"
        if body.budget is None:
            param = "reasoning_effort" if suffix is None else "model"
        raise refusal_of(error, param) from error


def chat_requests(
    body: ChatBody, budget: ResolvedBudget, service: Service
) -> tuple[list[GenerationRequest], list[Speech]]:
    """One for each answer to a conversation, and what parts its text.

    Raises:
        Refusal: A field asks for what cannot be.
    """
    _refuse_given("functions", body.functions, "functions is an older name: use tools")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    called = called_tools(body)
    try:
        prompt = service.reader.chat(conversation(body, body.messages, called))
    except PromptError as error:
        raise refusal_of(error, "messages") from error
    most = body.max_completion_tokens or body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    requests = _requests(body, [prompt], most, service.engine.facts.context, top, budget, service)
    grammar = chat_grammar(called, requests[0].grammar, prompt, service.reader)
    if grammar is not None:
        _refuse_given("min_tokens", body.min_tokens, _ENDS_WHOLE)
    shown = shown_marks(called, service.reader)
    requests = [
        replace(
            asked,
            grammar=grammar,
            shown_tokens=asked.shown_tokens | shown,
            continues=bool(body.continue_final_message),
        )
        for asked in requests
    ]
    return requests, [speech_of(called, prompt, service.reader) for _ in requests]


def completion_requests(
    body: CompletionBody, budget: ResolvedBudget, service: Service
) -> list[GenerationRequest]:
    """One for each answer to each prompt, those to one prompt together.

    Raises:
        Refusal: A field asks for what cannot be.
    """
    _refuse_given("suffix", body.suffix, "suffix is not supported: the model only continues")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Refusal(400, "best_of is not supported: ask for n answers", param="best_of")
    try:
        prompts = service.reader.prompts(
            body.prompt, adds_special=body.add_special_tokens is not False
        )
    except PromptError as error:
        raise refusal_of(error, "prompt") from error
    if len(prompts) * (body.n or 1) > _MOST_REQUESTS:
        raise Refusal(
            400,
            f"{len(prompts)} prompts with {body.n} answers each are more than {_MOST_REQUESTS}",
            param="n",
        )
    top = body.logprobs
    return _requests(body, prompts, body.max_tokens, _COMPLETION_TOKENS, top, budget, service)


def _refuse_given(name: str, value: object, message: str) -> None:
    if value:
        raise Refusal(400, message, param=name, code="unsupported")


def _requests(
    body: RequestFields,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int | None,
    usual_tokens: int,
    top_logprobs: int | None,
    budget: ResolvedBudget,
    service: Service,
) -> list[GenerationRequest]:
    facts, defaults = service.engine.facts, service.defaults
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options needs stream: true", param="stream_options")
    answers, most = len(prompts) * (body.n or 1), facts.most_answers
    if most is not None and answers > most:  # it would be "try again later" for ever
        raise Refusal(
            400,
            f"{answers} answers in one request are more than this server holds ({most}): send "
            "fewer",
            param="n",
        )
    drafts = drafts_of(body.drafts, defaults.drafts, budget, facts)
    prompt_logprobs = scored_top(body, prompts)
    grammar, (stop, stop_tokens) = _grammar(body), _stop(body, service.reader)
    thinking = _thinking(body, service.reader)
    if grammar is not None:
        _refuse_given("min_tokens", body.min_tokens, _ENDS_WHOLE)
    shown = frozenset(service.reader.special.values() if body.skip_special_tokens is False else ())
    return [
        GenerationRequest(
            prompt=prompt,
            max_tokens=_room(
                len(prompt),
                max_tokens,
                defaults.most_tokens(len(prompt), usual_tokens),
                facts.context,
                body.min_tokens or 0,
            ),
            budget=budget,
            sampling=_sampling(body, answer, service),
            stop=stop,
            stop_tokens=stop_tokens,
            min_tokens=body.min_tokens or 0,
            shown_tokens=shown,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=_after_thinking(grammar, thinking, prompt),
            thinking=thinking,
            continues=isinstance(body, CompletionBody),
            drafts=drafts,
            ignore_eos=bool(body.ignore_eos),
            is_first=(place, answer) == (0, 0),
        )
        for place, prompt in enumerate(prompts)
        for answer in range(body.n or 1)
    ]


def _room(prompt_tokens: int, asked: int | None, default: int, context: int, least: int) -> int:
    """Tokens that the answer may have."""
    room = context - prompt_tokens
    if (1 if asked is None else asked) > room:
        answer = "" if asked is None else f" and an answer of {asked}"
        raise Refusal(
            400,
            f"a prompt of {prompt_tokens} tokens{answer} does not fit the context of {context}: "
            "ask for less",
            param="messages" if asked is None else "max_tokens",
            code="context_length_exceeded",
        )
    most = min(default, room) if asked is None else asked
    if least > most:
        raise Refusal(
            400,
            f"min_tokens: expected at most {most}, as the answer may have no more, got {least}",
            param="min_tokens",
            code="invalid_value",
        )
    return most


def _sampling(body: RequestFields, answer: int, service: Service) -> Sampling:
    """Sampling of one answer: with one seed, several answers to a prompt would be the same."""
    try:
        bias = service.reader.bias(body.logit_bias)
    except PromptError as error:
        raise refusal_of(error, "logit_bias") from error
    named = {name: value for name in _SAMPLED if (value := getattr(body, name)) is not None}
    if "top_k" in named:
        named["top_k"] = max(0, named["top_k"])
    seed = None if body.seed is None else (body.seed + answer) % 2**63
    return replace(service.defaults.sampling, **named, logit_bias=bias, seed=seed)


def _stop(body: RequestFields, reader: PromptReader) -> tuple[tuple[str, ...], frozenset[int]]:
    """Strings that end the answer, and tokens that do: a special token is no text of it."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    try:
        tokens = [reader.special_token(text) for text in stop]
    except PromptError as error:
        raise refusal_of(error, "stop") from error
    given = body.stop_token_ids or ()
    if given and max(given) >= reader.vocabulary:
        raise Refusal(
            400,
            f"stop_token_ids: expected token ids below {reader.vocabulary}, got {max(given)}",
            param="stop_token_ids",
            code="invalid_value",
        )
    return stop, frozenset({*given, *(token for token in tokens if token is not None)})


def _thinking(body: RequestFields, reader: PromptReader) -> ThinkingLimit | None:
    if body.thinking_tokens is None:
        return None
    try:
        return read_thinking_tokens(body.thinking_tokens, reader.thinking)
    except PolicyError as error:
        param = "thinking_tokens"
        raise Refusal(400, str(error), param=param, code="unsupported") from error


def _after_thinking(
    grammar: Grammar | None, thinking: ThinkingLimit | None, prompt: Sequence[int]
) -> Grammar | None:
    """A grammar, which holds after thinking that has a limit, where a prompt ends within it."""
    if grammar is None or thinking is None or not thinking.marks.is_open(prompt):
        return grammar
    return replace(grammar, after=Thought.of(thinking.marks, prompt))


def _grammar(body: RequestFields) -> Grammar | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar()
    if wanted.json_schema is None:
        raise Refusal(
            400, "response_format.json_schema: field required", param="response_format.json_schema"
        )
    return Grammar(schema=json.dumps(wanted.json_schema.json_schema))
