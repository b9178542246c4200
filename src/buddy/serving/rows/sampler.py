"""The next token of each row: penalties, bias, grammar, temperature, nucleus, seed.

The order is that of transformers' processors: penalties and bias, the grammar, temperature, top_k,
top_p, min_p. What a row draws depends on its own logits and generator alone. All rows are drawn
together where their logits are, and sums go along a row by itself, so that company changes no bit.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from buddy.budget.thinking import ThinkingWatch
from buddy.depth.wide import widened, widest_float
from buddy.errors import BuddyError
from buddy.generation.next_token import best_token
from buddy.generation.thinking import close_thinking
from buddy.serving.request import Sampling, TokenLogprobs
from buddy.serving.rows.grammar import GrammarState

_CANDIDATES: Final = 1024  # nearly every nucleus is within them; where one is not, all are sorted
# In the place of a token: logits that are no numbers, none that may follow, a wider nucleus.
_DAMAGED, _NOTHING, _WIDER = -1, -2, -3
_ERRORS: Final = {
    _DAMAGED: "the logits of this answer are not finite: the model's weights are damaged, or too "
    "large for their number format",
    _NOTHING: "no token may follow: the penalties, the grammar and logit_bias leave none",
}
_LOG: Final = logging.getLogger("buddy")


@dataclass(frozen=True, slots=True)
class Picked:
    """The next token of a row, or why there is none."""

    token: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    param: str | None = None
    """The field of the request that is at fault, where it is."""

    def at(self, offset: int) -> tuple[TokenLogprobs, ...]:
        """Its log-probabilities, where there are any, by its place in the text."""
        return () if self.logprobs is None else (replace(self.logprobs, offset=offset),)


class Picker:
    """What one row needs to choose its tokens.

    Args:
        sampling: As the request says; the ids of its `logit_bias` are tokens of the model.
        prompt: Token ids; the repetition penalty counts them.
        top_logprobs: Alternatives that come with each logprob; None = no logprobs.
        grammar: That the text follows.
        ends: Tokens that end the answer, which may not come before `min_tokens`.
        min_tokens: Tokens that the answer has at least.
        thinking: Watches its limit of thinking; None = it has none.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        top_logprobs: int | None = None,
        grammar: GrammarState | None = None,
        *,
        ends: Collection[int] = (),
        min_tokens: int = 0,
        thinking: ThinkingWatch | None = None,
    ) -> None:
        self.sampling, self.top_logprobs, self.grammar = sampling, top_logprobs, grammar
        self._ends, self._to_come, self.thinking = np.array([*ends], np.int64), min_tokens, thinking
        self.is_greedy = sampling.temperature == 0
        is_counted = sampling.repetition_penalty != 1
        self.seen = np.unique(np.array(prompt, np.int64)) if is_counted else None
        counts = sampling.presence_penalty or sampling.frequency_penalty
        self.answer = np.empty(0, np.int64) if counts else None
        self._generator = None if self.is_greedy else torch.Generator()
        if self._generator is not None:
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed % 2**63)
        self._changes_all = bool(sampling.logit_bias) or any(
            change is not None for change in (self.seen, self.answer, self.grammar)
        )

    @property
    def held(self) -> NDArray[np.int64]:
        """Tokens that may not come yet, as they would end the answer."""
        return self._ends if self._to_come > 0 else self._ends[:0]

    @property
    def changes(self) -> bool:
        """Whether its next token is chosen from other logits than the model's."""
        return self._changes_all or len(self.held) > 0 or self.closes is not None

    @property
    def closes(self) -> int | None:
        """The mark that must end its thinking now; in the text of a grammar a mark is none."""
        is_text = self.grammar is not None and not self.grammar.is_thinking
        return self.thinking.closes if self.thinking and not is_text else None

    @property
    def is_plain(self) -> bool:
        """Whether its next token is the best of the logits as they are."""
        return self.is_greedy and not self.changes and self.top_logprobs is None

    def draw(self) -> float:
        """A number in [0, 1)."""
        assert self._generator is not None
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def take(self, token: int) -> None:
        """The row goes on with this token.

        Raises:
            GrammarError: Its grammar does not allow it.
        """
        self._to_come -= 1
        if self.thinking is not None:
            self.thinking = self.thinking.after(token)
        if self.seen is not None:
            self.seen = np.append(self.seen, token)
        if self.answer is not None:
            self.answer = np.append(self.answer, token)
        if self.grammar is not None:
            self.grammar.take(token)


def pick(logits: Float[Tensor, "rows vocab"], pickers: Sequence[Picker]) -> list[Picked]:
    """Choose the next token of each row; the pickers are not told of it.

    A row whose logits are NaN, or that can choose nothing, has an error; others go on. So they do
    whatever goes wrong with a row's own grammar. The host waits for a GPU once, and once more where
    a nucleus is wider than the candidates.

    Args:
        logits: Of each row; float32 or narrower.
        pickers: Of each row.
    """
    best, is_sound = _best(logits)
    if all(picker.is_plain for picker in pickers):
        return _told(torch.where(is_sound, best, _DAMAGED), {}, pickers)
    logits = logits.detach().float()
    errors, may_follow = dict[int, Picked](), is_sound
    changes = any(picker.changes for picker in pickers)
    if changes:
        logits = logits.clone()
        _penalise(logits, pickers)
    logprobs = {
        row: logits[row].log_softmax(-1)
        for row, picker in enumerate(pickers)
        if picker.top_logprobs is not None
    }
    if changes:
        errors = _follow_grammars(logits, pickers)
        _hold_ends(logits, pickers)
        close_thinking(logits, [picker.closes for picker in pickers])
        best, may_follow = _best(logits)
    drawing = [row for row, picker in enumerate(pickers) if not picker.is_greedy]
    numbers = {row: pickers[row].draw() for row in drawing}
    for width in (_CANDIDATES, logits.shape[1]):
        if drawing:
            at, asked = _there(drawing, logits, torch.long), [pickers[row] for row in drawing]
            samplings = [picker.sampling for picker in asked]
            best[at] = sample(logits[at], samplings, [numbers[row] for row in drawing], width)
        tokens = torch.where(may_follow, best, _NOTHING)
        told = _told(torch.where(is_sound, tokens, _DAMAGED), logprobs, pickers)
        drawing = [row for row, picked in enumerate(told) if picked.token == _WIDER]
        if not drawing:
            break
    return [errors.get(row, picked) for row, picked in enumerate(told)]


def _best(
    logits: Float[Tensor, "rows vocab"],
) -> tuple[Int[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """The best token of each row, and whether its logit is a number."""
    best = best_token(logits)
    return best, logits.gather(1, best[:, None])[:, 0].isfinite()


def _penalise(logits: Float[Tensor, "rows vocab"], pickers: Sequence[Picker]) -> None:
    """Penalties and bias, in place."""
    asked = [picker.sampling for picker in pickers]
    seen = {row: picker.seen for row, picker in enumerate(pickers) if picker.seen is not None}
    if seen:
        rows, tokens = _places(seen, logits)
        penalty = _there([each.repetition_penalty for each in asked], logits)[rows]
        old = logits[rows, tokens]
        logits[rows, tokens] = torch.where(old < 0, old * penalty, old / penalty)
    counted = {
        row: np.unique(picker.answer, return_counts=True)
        for row, picker in enumerate(pickers)
        if picker.answer is not None
    }
    if counted:
        rows, tokens = _places({row: ids for row, (ids, _) in counted.items()}, logits)
        counts = _there(np.concatenate([many for _, many in counted.values()]), logits)
        frequency = _there([each.frequency_penalty for each in asked], logits)[rows]
        presence = _there([each.presence_penalty for each in asked], logits)[rows]
        logits[rows, tokens] = logits[rows, tokens] - frequency * counts - presence
    bias = {row: each.logit_bias for row, each in enumerate(asked) if each.logit_bias}
    if bias:
        rows, tokens = _places({row: np.array([*each]) for row, each in bias.items()}, logits)
        added = [value for each in bias.values() for value in each.values()]
        logits[rows, tokens] += _there(added, logits)


def _places(
    tokens: Mapping[int, NDArray[np.int64]], like: Tensor
) -> tuple[Int[Tensor, " places"], Int[Tensor, " places"]]:
    """Row and token of each place, where a tensor is."""
    rows = np.repeat([*tokens], [len(ids) for ids in tokens.values()])
    ids = np.concatenate([*tokens.values()])
    return _there(rows, like, torch.long), _there(ids, like, torch.long)


def _follow_grammars(
    logits: Float[Tensor, "rows vocab"], pickers: Sequence[Picker]
) -> dict[int, Picked]:
    """Forbid what may not follow, in place; the errors of rows whose grammar cannot go on."""
    errors: dict[int, Picked] = {}
    for row, picker in enumerate(pickers):
        if picker.grammar is None:
            continue
        try:
            forbidden = picker.grammar.forbidden().to(logits.device, non_blocking=True)
            logits[row].masked_fill_(forbidden, -math.inf)
        except BuddyError as error:
            errors[row] = Picked(error=str(error), param=picker.grammar.param)
        except Exception:  # what one row asks for must hurt nobody else
            _LOG.exception("no token can be chosen for a row")
            errors[row] = Picked(error="no token can be chosen with these sampling parameters")
    return errors


def _hold_ends(logits: Float[Tensor, "rows vocab"], pickers: Sequence[Picker]) -> None:
    """Forbid what would end answers that are to be longer, in place."""
    held = {row: picker.held for row, picker in enumerate(pickers) if len(picker.held)}
    if held:
        logits[_places(held, logits)] = -math.inf


def _told(
    tokens: Int[Tensor, " rows"],
    logprobs: Mapping[int, Float[Tensor, " vocab"]],
    pickers: Sequence[Picker],
) -> list[Picked]:
    """What the host hears of each row, in one copy: it waits for a GPU here."""
    parts = []
    for row, known in logprobs.items():
        values, ids = known.topk(min(pickers[row].top_logprobs or 0, len(known)))
        own = known[tokens[row : row + 1].clamp(min=0)]
        parts.append(torch.cat([own, values, widened(ids)]))
    numbers = iter((torch.cat([widened(tokens), *parts]) if parts else tokens).tolist())
    picked = [
        Picked(error=_ERRORS[token]) if token in _ERRORS else Picked(token)
        for token in map(int, islice(numbers, len(pickers)))
    ]
    for row, part in zip(logprobs, parts, strict=True):
        own_logprob, *best = islice(numbers, len(part))
        most, token = len(best) // 2, picked[row].token
        top = tuple(zip(map(int, best[most:]), best[:most], strict=True))
        if token >= 0:
            found = TokenLogprobs(token=token, logprob=own_logprob, top=top)
            picked[row] = Picked(token, found)
    return picked


def sample(
    logits: Float[Tensor, "rows vocab"],
    samplings: Sequence[Sampling],
    numbers: Sequence[float],
    width: int,
) -> Int[Tensor, " rows"]:
    """Draw a token for each row.

    Args:
        logits: Of each row.
        samplings: Of each row.
        numbers: Of each row, in [0, 1): what it has drawn.
        width: Tokens that a nucleus is looked for among.

    Returns:
        Tokens, or -3 of rows whose nucleus is wider.
    """
    cooled, drawn = _cooled(logits, samplings), _there(numbers, logits, widest_float(logits.device))
    tokens = torch.empty(len(samplings), dtype=torch.long, device=logits.device)
    narrow = [row for row, asked in enumerate(samplings) if asked.top_k or asked.top_p < 1]
    wide = sorted(set(range(len(samplings))) - set(narrow))
    if wide:
        at = _there(wide, logits, torch.long)
        tokens[at] = _draw(spread(cooled[at], [samplings[row] for row in wide]), drawn[at])
    if narrow:
        at = _there(narrow, logits, torch.long)
        weights, ids, holds = nucleus(cooled[at], [samplings[row] for row in narrow], width)
        chosen = ids.gather(1, _draw(weights, drawn[at])[:, None])[:, 0]
        tokens[at] = torch.where(holds, chosen, _WIDER)
    return tokens


def _draw(
    weights: Float[Tensor, "rows places"], drawn: Float[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """A place of each row, as likely as its weight says."""
    edges = weights.cumsum(-1)
    place = torch.searchsorted(edges, drawn[:, None] * edges[:, -1:], right=True)[:, 0]
    # Rounding must not draw what has no weight: go back to the last that has some.
    places = torch.arange(1, weights.shape[1] + 1, device=weights.device)
    last = (weights > 0).long().mul(places).amax(-1) - 1
    return torch.minimum(place, last.clamp(min=0))  # no weight is a number where no logit is


def spread(
    cooled: Float[Tensor, "rows vocab"], samplings: Sequence[Sampling]
) -> Float[Tensor, "rows vocab"]:
    """Weights of all tokens under min_p, in the order of their ids; `widened`, the best has 1."""
    weights = widened(cooled).exp_()
    least = _there([asked.min_p for asked in samplings], weights, weights.dtype)
    return weights.masked_fill_(weights < least[:, None], 0.0)


def nucleus(
    cooled: Float[Tensor, "rows vocab"], samplings: Sequence[Sampling], width: int
) -> tuple[Float[Tensor, "rows places"], Int[Tensor, "rows places"], Bool[Tensor, " rows"]]:
    """Weights of the best tokens under top_k, top_p and min_p, best first.

    Args:
        cooled: Logits over the temperature, the best of each row at 0.
        samplings: Of each row.
        width: Tokens that are looked at.

    Returns:
        Weights, `widened`, the best has 1 and what is left out has 0; the tokens' ids; and of each
        row whether all that is left in is among them.
    """
    vocab = cooled.shape[1]
    width = min(width, vocab)
    values, ids = cooled.topk(width, dim=-1)
    weights = widened(values).exp_()
    most = _there([asked.top_k or vocab for asked in samplings], cooled, torch.long)
    rank = torch.arange(width, device=cooled.device)
    weights.masked_fill_(rank >= most[:, None], 0.0)
    is_in = [min(asked.top_k or vocab, vocab) <= width for asked in samplings]
    holds = _there(is_in, cooled, torch.bool)
    if any(asked.top_p < 1 for asked in samplings):
        share = _there([asked.top_p for asked in samplings], cooled, weights.dtype)
        limit = share * _wholes(cooled, weights, samplings, is_in)
        sums = weights.cumsum(-1)
        is_free = _there([not asked.top_k for asked in samplings], cooled, torch.bool)
        holds = holds | (is_free & (sums[:, -1] >= limit))
        weights.masked_fill_((sums - weights >= limit[:, None]) & (rank > 0), 0.0)
    least = _there([asked.min_p for asked in samplings], cooled, weights.dtype)
    return weights.masked_fill_(weights < least[:, None], 0.0), ids, holds


def _wholes(
    cooled: Float[Tensor, "rows vocab"],
    weights: Float[Tensor, "rows places"],
    samplings: Sequence[Sampling],
    is_in: Sequence[bool],
) -> Float[Tensor, " rows"]:
    """What top_p is a share of, by row: its weights, or those of all tokens; infinite without."""
    infinite = torch.full((), math.inf, dtype=weights.dtype, device=cooled.device)

    def whole(row: int) -> Tensor:
        if samplings[row].top_p >= 1:
            return infinite
        return (weights[row] if is_in[row] else widened(cooled[row]).exp_()).sum()

    return torch.stack([whole(row) for row in range(len(samplings))])


def _cooled(
    logits: Float[Tensor, "rows vocab"], samplings: Sequence[Sampling]
) -> Float[Tensor, "rows vocab"]:
    """Logits over the temperature, the best of each row at 0, so that any temperature is safe."""
    heat = _there([asked.temperature for asked in samplings], logits)[:, None]
    heat = heat.clamp(min=torch.finfo(heat.dtype).tiny)
    return (logits - logits.amax(-1, keepdim=True)) / heat


def _there(
    values: Sequence[int | float] | NDArray[np.int64],
    like: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Shaped[Tensor, " values"]:
    """Numbers of the host where a tensor is; the host does not wait."""
    return torch.as_tensor(values, dtype=dtype).to(like.device, non_blocking=True)
