"""What an answer says of its prompt: the text, and the log-probabilities of its tokens."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from buddy.serving.http.bodies import CompletionBody, RequestFields
from buddy.serving.http.prompts import PromptReader, finite
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.schema import CompletionLogprobs, PromptLogprob, PromptLogprobs
from buddy.serving.request import PromptScores, TokenLogprobs

MOST_SCORES: Final = 2**18
"""Log-probabilities of prompts' tokens, alternatives included, that one answer may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """A prompt as its answers show it; each of its numbers is asked for by a field of its own."""

    tokens: tuple[int, ...]
    text: str = ""
    """What the answer's text begins with."""
    offsets: tuple[int, ...] = ()
    """Characters of the text that are complete before each token."""
    top: int | None = None
    """Alternatives of each token among the answer's `logprobs`; None = they begin after it."""
    prompt_top: int | None = None
    """Alternatives of each token in `prompt_logprobs`; None = there are none."""

    def logprobs(
        self, scores: PromptScores | None, answer: Sequence[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """Tokens of the prompt from the second on, where they are wanted, then the answer's.

        Args:
            scores: Of the prompt; None where they are no part of this.
            answer: Tokens of it, whose places are counted from its own beginning.
        """
        after = [replace(token, offset=token.offset + len(self.text)) for token in answer]
        if scores is None or self.top is None:
            return after
        return [*self._scored(scores, self.top), *after]

    def put_first(
        self, scores: PromptScores | None, made: CompletionLogprobs, reader: PromptReader
    ) -> None:
        """Put the prompt's first token, which follows nothing, before what `logprobs` became."""
        if scores is not None and self.top is not None:
            made["tokens"].insert(0, reader.token_text(self.tokens[0])[0])
            made["token_logprobs"].insert(0, None)
            made["top_logprobs"].insert(0, None)
            made["text_offset"].insert(0, self.offsets[0])

    def prompt_logprobs(
        self, scores: PromptScores | None, reader: PromptReader
    ) -> PromptLogprobs | None:
        """The field of that name; None where it is not asked for."""
        if self.prompt_top is None or scores is None:
            return None

        def told(token: int, logprob: float, rank: int) -> PromptLogprob:
            text = reader.token_text(token)[0]
            return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text)

        listed: PromptLogprobs = [None]
        ranks = scores.ranks.tolist()
        for own, own_rank in zip(self._scored(scores, self.prompt_top), ranks, strict=True):
            entry = {str(own.token): told(own.token, own.logprob, own_rank)}
            for rank, (token, logprob) in enumerate(own.top, 1):
                entry.setdefault(str(token), told(token, logprob, rank))
            listed.append(entry)
        return listed

    def _scored(self, scores: PromptScores, top: int) -> list[TokenLogprobs]:
        """Each token from the second on."""
        found = zip(
            self.tokens[1:],
            scores.logprobs.tolist(),
            scores.top_tokens[:, :top].tolist(),
            scores.top_logprobs[:, :top].tolist(),
            self.offsets[1:] or [0] * (len(self.tokens) - 1),
            strict=True,
        )
        return [
            TokenLogprobs(
                token=token,
                logprob=own,
                top=tuple(zip(best, values, strict=True)),
                offset=offset,
            )
            for token, own, best, values, offset in found
        ]


def scored_top(body: RequestFields, prompts: Sequence[Sequence[int]]) -> int | None:
    """How many alternatives are asked for with the tokens of the prompts; None = no scores.

    Args:
        body: The request.
        prompts: Its prompts, as token ids.

    Raises:
        Refusal: They cannot be had so, or would be too many.
    """
    echoed = body if isinstance(body, CompletionBody) and body.echo else None
    asked = {
        "logprobs": None if echoed is None else echoed.logprobs,
        "prompt_logprobs": body.prompt_logprobs,
    }
    wanted = {name: top for name, top in asked.items() if top is not None}
    if body.prompt_logprobs is not None and body.stream:
        raise Refusal(
            400,
            "prompt_logprobs are not streamed: leave stream out, or ask /v1/completions for echo "
            "and logprobs",
            param="prompt_logprobs",
        )
    if body.max_tokens == 0 and not (echoed or wanted):
        raise Refusal(
            400,
            "max_tokens 0 asks for nothing: expected at least 1, or echo: true or prompt_logprobs "
            "for the prompt alone",
            param="max_tokens",
        )
    tokens = sum(map(len, prompts)) * (body.n or 1)
    numbers = sum(tokens * (1 + top) for top in wanted.values())
    if numbers > MOST_SCORES:
        name = max(wanted, key=lambda field: wanted[field])
        raise Refusal(
            400,
            f"{numbers:,} log-probabilities of {tokens:,} tokens of prompts are more than an "
            f"answer may have ({MOST_SCORES:,}): ask for fewer {name}, or send fewer prompts",
            param=name,
        )
    return max(wanted.values(), default=None)


def echoes(
    body: RequestFields, prompts: Sequence[tuple[int, ...]], reader: PromptReader
) -> list[Echo]:
    """What answers say of each prompt of a request."""
    prompt_top = body.prompt_logprobs
    if not isinstance(body, CompletionBody) or not body.echo:
        return [Echo(tokens=tokens, prompt_top=prompt_top) for tokens in prompts]
    sent = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    shown = []
    for place, tokens in enumerate(prompts):
        given = sent[place]  # a token's id where token ids are the only prompt
        text, offsets = _located(tokens, given if isinstance(given, str) else None, reader)
        shown.append(
            Echo(
                tokens=tokens,
                text=text,
                offsets=offsets,
                top=body.logprobs,
                prompt_top=prompt_top,
            )
        )
    return shown


def _located(
    tokens: Sequence[int], given: str | None, reader: PromptReader
) -> tuple[str, tuple[int, ...]]:
    """The text of tokens, and how many of its characters are complete before each of them.

    Args:
        tokens: Of the prompt, with what the tokenizer puts around a text.
        given: The text that was sent; None = token ids were.
        reader: Has the tokenizer.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[str] = []
    lengths = [0]
    for token in tokens:
        pieces.append(decoder.decode(bytes(reader.token_text(token)[1])))
        lengths.append(lengths[-1] + len(pieces[-1]))
    joined = "".join([*pieces, decoder.decode(b"", True)])
    text = given
    if text is None:
        text = reader.text(tokens)
        text = text if text in joined else joined  # broken bytes are not everywhere U+FFFD alike
    ahead = max(0, joined.find(text))  # such as a beginning of text, or a first word's space
    return text, tuple(min(max(0, length - ahead), len(text)) for length in lengths[:-1])
