"""Routes that turn texts and conversations into token ids, and token ids into text, as vLLM has."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from buddy.errors import PromptError
from buddy.serving.http.asking import budget_of
from buddy.serving.http.beginning import in_turn
from buddy.serving.http.bodies import DetokenizeBody, RequestFields, TokenizeBody, read_body
from buddy.serving.http.openai import body_named, content_of, refused_by
from buddy.serving.http.refusals import Refusal, refusal_of
from buddy.serving.http.schema import Detokenized, Tokenized
from buddy.serving.http.service import Service
from buddy.serving.http.tool_choice import called_tools, conversation
from buddy.serving.http.unknown_fields import check_unknown


def add_tokens(api: FastAPI, service: Service) -> None:
    """Add the routes."""

    def options(name: str) -> dict[str, Any]:
        return {
            "responses": refused_by(400, 401, 403, 404, 408, 413, 429),
            "openapi_extra": body_named(name),
            "tags": ["Tokens"],
        }

    @api.post("/tokenize", response_model=Tokenized, **options("TokenizeBody"))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        content = await content_of(request)
        return await in_turn(service, content, partial(_tokenize, service, content))

    @api.post("/detokenize", response_model=Detokenized, **options("DetokenizeBody"))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        content = await content_of(request)
        return await in_turn(service, content, partial(_detokenize, service, content))


def _tokenize(service: Service, content: bytes) -> Response:
    body, reader = read_body(TokenizeBody, content), service.reader
    headers = _checked(service, body)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal(400, "expected one of prompt and messages", param="prompt")
    try:
        if body.messages is not None:
            tokens = reader.chat(conversation(body, body.messages, called_tools(body)))
        else:
            adds_special = body.add_special_tokens is not False
            (tokens,) = reader.prompts(body.prompt or "", adds_special=adds_special)
    except PromptError as error:
        raise refusal_of(error, "prompt" if body.messages is None else "messages") from error
    made = Tokenized(
        count=len(tokens), max_model_len=service.engine.facts.context, tokens=list(tokens)
    )
    if body.return_token_strs:
        made["token_strs"] = [reader.token_text(token)[0] for token in tokens]
    return JSONResponse(made, headers=headers)


def _detokenize(service: Service, content: bytes) -> Response:
    body = read_body(DetokenizeBody, content)
    headers = _checked(service, body)
    try:
        text = service.reader.text(body.tokens)
    except PromptError as error:
        raise refusal_of(error, "tokens") from error
    return JSONResponse(Detokenized(prompt=text), headers=headers)


def _checked(service: Service, body: TokenizeBody | DetokenizeBody) -> dict[str, str]:
    """Headers of the answer.

    Raises:
        Refusal: Another model is named, or a field that cannot be ignored.
    """
    ignored = check_unknown(body)
    budget_of(RequestFields(model=body.model), service.rules, service.engine.facts.model)
    return service.note_ignored(ignored)
