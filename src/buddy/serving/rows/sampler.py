"""The next token of each row: penalties, bias, grammar, temperature, nucleus, seed.

The order is that of transformers' processors: penalties and bias, the grammar, temperature, top_k,
top_p, min_p. What a row draws depends on its own logits and generator alone.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.errors import BuddyError, ModelError
from buddy.generation.next_token import best_token
from buddy.serving.request import GrammarError, Sampling, TokenLogprobs
from buddy.serving.rows.grammar import GrammarState

_CANDIDATES: Final = 1024
"""Tokens that nearly every nucleus is within; where one is not, all are sorted."""
_LOG: Final = logging.getLogger("buddy")


@dataclass(frozen=True, slots=True)
class Picked:
    """The next token of a row, or why there is none."""

    token: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    param: str | None = None
    """The field of the request that is at fault, where it is."""


class Picker:
    """What one row needs to choose its tokens.

    Args:
        sampling: As the request says.
        prompt: Token ids; the repetition penalty counts them.
        vocab: Logits of a token.
        top_logprobs: Alternatives that come with each logprob; None = no logprobs.
        grammar: That the text follows.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab: int,
        top_logprobs: int | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.sampling, self.top_logprobs, self.grammar = sampling, top_logprobs, grammar
        self.is_greedy = sampling.temperature == 0
        self.bias: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias.items(), strict=True)
            self.bias = torch.tensor(ids), torch.tensor(values, dtype=torch.float32)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(vocab, dtype=torch.bool)
            self.seen[torch.tensor(prompt)] = True
        counts = sampling.presence_penalty or sampling.frequency_penalty
        self.counts = torch.zeros(vocab) if counts else None
        self._generator: torch.Generator | None = None
        if not self.is_greedy:
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed % 2**63)
        self.changes = any(
            change is not None for change in (self.bias, self.seen, self.counts, self.grammar)
        )
        self.is_plain = self.is_greedy and not self.changes and top_logprobs is None
        """Its token is the best of the logits as they are."""

    def draw(self) -> float:
        """A number in [0, 1)."""
        assert self._generator is not None
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def penalise(self, logits: Float[Tensor, " vocab"]) -> None:
        """Penalties and bias, in place."""
        if self.seen is not None:
            penalty = self.sampling.repetition_penalty
            seen_logits = logits[self.seen]
            logits[self.seen] = torch.where(
                seen_logits < 0, seen_logits * penalty, seen_logits / penalty
            )
        if self.counts is not None:
            logits -= self.sampling.frequency_penalty * self.counts
            logits -= self.sampling.presence_penalty * (self.counts > 0)
        if self.bias is not None:
            logits[self.bias[0]] += self.bias[1]

    def take(self, token: int) -> None:
        """The row goes on with this token.

        Raises:
            GrammarError: Its grammar does not allow it.
        """
        if self.seen is not None:
            self.seen[token] = True
        if self.counts is not None:
            self.counts[token] += 1
        if self.grammar is not None:
            self.grammar.take(token)


def pick(logits: Float[Tensor, "rows vocab"], pickers: Sequence[Picker]) -> list[Picked]:
    """Choose the next token of each row; the pickers are not told of it.

    A row whose logits are NaN, or that can choose nothing, has an error; others go on. So they do
    whatever goes wrong with a row's own penalties, bias or grammar.

    Args:
        logits: Of each row; float32 or narrower.
        pickers: Of each row.
    """
    if all(picker.is_plain for picker in pickers):
        most, best = logits.max(-1)
        tokens_or_none = torch.where(most.isfinite(), best, -1).tolist()  # one wait for a GPU
        return [
            Picked(token) if token >= 0 else Picked(error=_damaged()) for token in tokens_or_none
        ]
    logits = logits.detach().float().cpu()
    errors: dict[int, Picked] = {
        row: Picked(error=_damaged())
        for row, value in enumerate(logits.amax(-1).tolist())
        if not math.isfinite(value)
    }
    if any(picker.changes for picker in pickers):
        logits = logits.clone()
    logprobs: dict[int, Float[Tensor, " vocab"]] = {}
    for row, picker in enumerate(pickers):
        if row in errors:
            continue
        try:
            picker.penalise(logits[row])
            if picker.top_logprobs is not None:
                logprobs[row] = logits[row].log_softmax(-1)
            if picker.grammar is not None:
                logits[row].masked_fill_(picker.grammar.forbidden(), -math.inf)
            if picker.changes and not math.isfinite(float(logits[row].max())):
                raise ModelError(
                    "no token may follow: the penalties, the grammar and logit_bias leave none"
                )
        except BuddyError as error:
            param = "response_format" if isinstance(error, GrammarError) else None
            errors[row] = Picked(error=str(error), param=param)
        except Exception:  # what one row asks for must hurt nobody else
            _LOG.exception("no token can be chosen for a row")
            why = "no token can be chosen with these sampling parameters"
            errors[row] = Picked(error=why)
    good = [row for row in range(len(pickers)) if row not in errors]
    tokens: dict[int, int] = dict(enumerate(best_token(logits).tolist()))
    drawing = [row for row in good if not pickers[row].is_greedy]
    if drawing:
        chosen = sample(logits[drawing], [pickers[row] for row in drawing])
        tokens.update(zip(drawing, chosen, strict=True))
    return [
        errors[row]
        if row in errors
        else Picked(tokens[row], _logprobs(logprobs.get(row), tokens[row], picker.top_logprobs))
        for row, picker in enumerate(pickers)
    ]


def sample(logits: Float[Tensor, "rows vocab"], pickers: Sequence[Picker]) -> list[int]:
    """Draw a token for each row."""
    samplings = [picker.sampling for picker in pickers]
    cooled = _cooled(logits, samplings)
    wide = [
        row for row, sampling in enumerate(samplings) if not sampling.top_k and sampling.top_p >= 1
    ]
    narrow = sorted(set(range(len(samplings))) - set(wide))
    tokens: dict[int, int] = {}
    if wide:
        weights = spread(cooled[wide], [samplings[row] for row in wide])
        places = _draw(weights, [pickers[row] for row in wide])
        tokens |= dict(zip(wide, places.tolist(), strict=True))
    for width in (_CANDIDATES, logits.shape[1]):
        if not narrow:
            break
        weights, ids, holds = nucleus(cooled[narrow], [samplings[row] for row in narrow], width)
        within = [at for at, is_held in enumerate(holds) if is_held]
        if within:
            places = _draw(weights[within], [pickers[narrow[at]] for at in within])
            drawn = ids[within].gather(1, places[:, None])[:, 0]
            tokens |= dict(zip([narrow[at] for at in within], drawn.tolist(), strict=True))
        narrow = [row for row, is_held in zip(narrow, holds, strict=True) if not is_held]
    return [tokens[row] for row in range(len(pickers))]


def _draw(weights: Float[Tensor, "rows places"], pickers: Sequence[Picker]) -> Int[Tensor, " rows"]:
    """A place of each row, as likely as its weight says."""
    edges = weights.cumsum(-1)
    drawn = torch.tensor([picker.draw() for picker in pickers], dtype=torch.float64)[:, None]
    place = torch.searchsorted(edges, drawn * edges[:, -1:], right=True)[:, 0]
    # Rounding must not draw what has no weight: go back to the last that has some.
    last = (weights > 0).long().mul(torch.arange(1, weights.shape[1] + 1)).amax(-1) - 1
    return torch.minimum(place, last)


def spread(
    cooled: Float[Tensor, "rows vocab"], samplings: Sequence[Sampling]
) -> Float[Tensor, "rows vocab"]:
    """Weights of all tokens under min_p, in the order of their ids; float64, the best has 1."""
    weights = cooled.double().exp_()
    least = torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.float64)[:, None]
    return weights.masked_fill_(weights < least, 0.0)


def nucleus(
    cooled: Float[Tensor, "rows vocab"], samplings: Sequence[Sampling], width: int
) -> tuple[Float[Tensor, "rows places"], Int[Tensor, "rows places"], list[bool]]:
    """Weights of the best tokens under top_k, top_p and min_p, best first.

    Args:
        cooled: Logits over the temperature, the best of each row at 0.
        samplings: Of each row.
        width: Tokens that are looked at.

    Returns:
        Weights, float64, the best has 1 and what is left out has 0; the tokens' ids; and of each
        row whether all that is left in is among them.
    """
    width = min(width, cooled.shape[1])
    values, ids = cooled.topk(width, dim=-1)
    weights = values.double().exp_()
    rank = torch.arange(width)
    holds = []
    for row, sampling in enumerate(samplings):
        row_weights = weights[row]  # a view
        if sampling.top_k:
            row_weights[sampling.top_k :] = 0
        is_held = 0 < sampling.top_k <= width or width == cooled.shape[1]
        if sampling.top_p < 1:
            whole = row_weights.sum() if is_held else cooled[row].double().exp().sum()
            sums = row_weights.cumsum(0)
            is_held = is_held or (not sampling.top_k and bool(sums[-1] >= sampling.top_p * whole))
            row_weights[(sums - row_weights >= sampling.top_p * whole) & (rank > 0)] = 0
        row_weights[row_weights < sampling.min_p] = 0
        holds.append(is_held)
    return weights, ids, holds


def _cooled(
    logits: Float[Tensor, "rows vocab"], samplings: Sequence[Sampling]
) -> Float[Tensor, "rows vocab"]:
    """Logits over the temperature, the best of each row at 0, so that any temperature is safe."""
    heat = torch.tensor([sampling.temperature for sampling in samplings])[:, None]
    heat.clamp_(min=torch.finfo(heat.dtype).tiny)
    return (logits - logits.amax(-1, keepdim=True)) / heat


def _logprobs(
    known: Float[Tensor, " vocab"] | None, token: int, most: int | None
) -> TokenLogprobs | None:
    if known is None or most is None:
        return None
    values, ids = known.topk(min(most, len(known)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token=token, logprob=float(known[token]), top=top)


def _damaged() -> str:
    return (
        "the logits of this answer are not finite: the model's weights are damaged, or too large "
        "for their number format"
    )
