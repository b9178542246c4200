"""A body that pydantic has read becomes the requests that the engine takes."""

import json
from collections.abc import Sequence
from typing import Final

from buddy.budget.resolved import ResolvedBudget
from buddy.errors import BudgetError, PromptError, shown
from buddy.serving.client import EngineFacts
from buddy.serving.http.budget_rules import BudgetRules, split_model
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.refusals import Refusal, refusal_of
from buddy.serving.http.schema import ChatBody, CompletionBody, RequestFields
from buddy.serving.request import GenerationRequest, Grammar, Sampling

_COMPLETION_TOKENS: Final = 16
"""Length of a completion that names none, as OpenAI has it; a chat may fill the context."""
_SAMPLED: Final = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Numbers that bodies and `Sampling` name alike; what a body leaves out has its default there."""
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
    body: ChatBody, budget: ResolvedBudget, facts: EngineFacts, reader: PromptReader
) -> list[GenerationRequest]:
    """One for each answer to a conversation.

    Raises:
        Refusal: A field asks for what cannot be.
    """
    _refuse_given("tools", body.tools, "this server calls no tools: leave tools out")
    _refuse_given("functions", body.functions, "this server calls no functions: leave them out")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    try:
        prompt = reader.chat(body.messages)
    except PromptError as error:
        raise refusal_of(error, "messages") from error
    most = body.max_completion_tokens or body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    return _requests(body, [prompt], most, facts.context, top, budget, facts, reader)


def completion_requests(
    body: CompletionBody, budget: ResolvedBudget, facts: EngineFacts, reader: PromptReader
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
        prompts = reader.prompts(body.prompt)
    except PromptError as error:
        raise refusal_of(error, "prompt") from error
    if len(prompts) * (body.n or 1) > _MOST_REQUESTS:
        raise Refusal(
            400,
            f"{len(prompts)} prompts with {body.n} answers each are more than {_MOST_REQUESTS}",
            param="n",
        )
    return _requests(
        body, prompts, body.max_tokens, _COMPLETION_TOKENS, body.logprobs, budget, facts, reader
    )


def _refuse_given(name: str, value: object, message: str) -> None:
    if value:
        raise Refusal(400, message, param=name, code="unsupported")


def _requests(
    body: RequestFields,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int | None,
    default_tokens: int,
    top_logprobs: int | None,
    budget: ResolvedBudget,
    facts: EngineFacts,
    reader: PromptReader,
) -> list[GenerationRequest]:
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
    grammar, stop = _grammar(body), _stop(body)
    return [
        GenerationRequest(
            prompt=prompt,
            max_tokens=_room(prompt, max_tokens, default_tokens, facts.context),
            budget=budget,
            sampling=_sampling(body, answer, reader),
            stop=stop,
            top_logprobs=top_logprobs,
            grammar=grammar,
            continues=isinstance(body, CompletionBody),
            ignore_eos=bool(body.ignore_eos),
            is_first=(place, answer) == (0, 0),
        )
        for place, prompt in enumerate(prompts)
        for answer in range(body.n or 1)
    ]


def _room(prompt: tuple[int, ...], asked: int | None, default: int, context: int) -> int:
    """Tokens that the answer may have."""
    room = context - len(prompt)
    if room < 1 or (asked or 1) > room:
        answer = "" if asked is None else f" and an answer of {asked}"
        raise Refusal(
            400,
            f"a prompt of {len(prompt)} tokens{answer} does not fit the context of {context}: "
            "ask for less",
            param="messages" if asked is None else "max_tokens",
            code="context_length_exceeded",
        )
    return min(default, room) if asked is None else asked


def _sampling(body: RequestFields, answer: int, reader: PromptReader) -> Sampling:
    """Sampling of one answer: with one seed, several answers to a prompt would be the same."""
    try:
        bias = reader.bias(body.logit_bias)
    except PromptError as error:
        raise refusal_of(error, "logit_bias") from error
    named = {name: float(value) for name in _SAMPLED if (value := getattr(body, name)) is not None}
    return Sampling(
        **named,
        top_k=max(0, body.top_k or 0),
        logit_bias=bias,
        seed=None if body.seed is None else (body.seed + answer) % 2**63,
    )


def _stop(body: RequestFields) -> tuple[str, ...]:
    stop = body.stop or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


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
