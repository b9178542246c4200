"""A body that pydantic has read becomes the requests that the engine takes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from buddy.budget.resolved import ResolvedBudget
from buddy.errors import BudgetError, PromptError, shown
from buddy.serving.http.bodies import ChatBody, CompletionBody, RequestFields
from buddy.serving.http.budget_rules import BudgetRules, split_model
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.refusals import Refusal, refusal_of
from buddy.serving.http.service import Service
from buddy.serving.request import GenerationRequest, Grammar, Sampling

_COMPLETION_TOKENS: Final = 16
"""Length of a completion that names none, as OpenAI has it; a chat may fill the context."""
_SAMPLED: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Numbers that bodies and `Sampling` name alike."""
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
) -> list[GenerationRequest]:
    """One for each answer to a conversation.

    Raises:
        Refusal: A field asks for what cannot be.
    """
    if body.tool_choice != "none":
        _refuse_given("tools", body.tools, "this server calls no tools: leave tools out")
    _refuse_given("functions", body.functions, "this server calls no functions: leave them out")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    options = body.chat_template_kwargs
    try:
        prompt = service.reader.chat(
            body.messages, thinks=None if options is None else options.enable_thinking
        )
    except PromptError as error:
        raise refusal_of(error, "messages") from error
    most = body.max_completion_tokens or body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    return _requests(body, [prompt], most, service.engine.facts.context, top, budget, service)


def completion_requests(
    body: CompletionBody, budget: ResolvedBudget, service: Service
) -> list[GenerationRequest]:
    """One for each answer to each prompt, those to one prompt together.

    Raises:
        Refusal: A field asks for what cannot be.
    """
    _refuse_given("echo", body.echo, "echo is not supported: the answer has no prompt in it")
    _refuse_given("suffix", body.suffix, "suffix is not supported: the model only continues")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Refusal(400, "best_of is not supported: ask for n answers", param="best_of")
    try:
        prompts = service.reader.prompts(body.prompt)
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
    grammar, (stop, stop_tokens) = _grammar(body), _stop(body, service.reader)
    return [
        GenerationRequest(
            prompt=prompt,
            max_tokens=_room(
                len(prompt),
                max_tokens,
                defaults.most_tokens(len(prompt), usual_tokens),
                facts.context,
            ),
            budget=budget,
            sampling=_sampling(body, answer, service),
            stop=stop,
            stop_tokens=stop_tokens,
            top_logprobs=top_logprobs,
            grammar=grammar,
            continues=isinstance(body, CompletionBody),
            ignore_eos=bool(body.ignore_eos),
            is_first=(place, answer) == (0, 0),
        )
        for place, prompt in enumerate(prompts)
        for answer in range(body.n or 1)
    ]


def _room(prompt_tokens: int, asked: int | None, default: int, context: int) -> int:
    """Tokens that the answer may have."""
    room = context - prompt_tokens
    if room < 1 or (asked or 1) > room:
        answer = "" if asked is None else f" and an answer of {asked}"
        raise Refusal(
            400,
            f"a prompt of {prompt_tokens} tokens{answer} does not fit the context of {context}: "
            "ask for less",
            param="messages" if asked is None else "max_tokens",
            code="context_length_exceeded",
        )
    return min(default, room) if asked is None else asked


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
    return stop, frozenset(token for token in tokens if token is not None)


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
