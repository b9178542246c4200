"""ROUGE of summaries: the route chosen again at every step (*Recompute*) or kept (*Reuse*)."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Annotated, Any

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.engine.state.cache import KVPolicy, check_kv_policy
from buddy.errors import DataError, PromptError
from buddy.generation.options import end_at_turns, token_numbers
from buddy.generation.trace import DepthTrace
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.phases import count_phases
from buddy.lab.evaluation.rouge.rouge_points import (
    METRICS,
    Answer,
    Logged,
    Way,
    to_results,
    ways_of,
)
from buddy.lab.evaluation.rouge.samsum import Dialogue, prompt_ids, read_answer
from buddy.lab.evaluation.samples import SampleLog
from buddy.model import BuddyForCausalLM
from buddy.processes import ALONE
from buddy.settings import Range, check_ranges

Scorer = Callable[[str, str], dict[str, float]]
"""(summary, answer) -> F-measure of each metric."""


def rouge_scorer() -> Scorer:
    """The `rouge-score` package, with Porter stemming.

    Raises:
        DataError: It is not installed.
    """
    try:
        from rouge_score import rouge_scorer as package
    except ImportError as error:
        raise DataError('rouge-score is not installed: pip install "buddy-llm[eval]"') from error
    scorer = package.RougeScorer(list(METRICS), use_stemmer=True)

    def score(summary: str, answer: str) -> dict[str, float]:
        scores = scorer.score(summary, answer)
        return {metric: float(scores[metric].fmeasure) for metric in METRICS}

    return score


@dataclass(frozen=True, kw_only=True, slots=True)
class RougeConfig:
    """How answers are made; greedily, in any case."""

    batch: Annotated[int, Range(1, 4096)] = 8
    """Dialogues at a time."""
    max_new_tokens: Annotated[int, Range(1, 2**24)] = 100
    """Longest answer."""
    kv_policy: KVPolicy | None = None
    """What skipped blocks leave in the cache; the model's own if None."""
    thinking_tokens: Annotated[int, Range(0, 2**31 - 1)] | None = None
    """Most tokens of thinking; None = any number."""

    def __post_init__(self) -> None:
        check_ranges(self, DataError)
        if self.kv_policy is not None:
            check_kv_policy(self.kv_policy)


@dataclass(frozen=True, slots=True)
class DialoguePrompt:
    """A dialogue, and the tokens that ask for its summary."""

    dialogue: Dialogue
    ids: list[int]

    @property
    def mark(self) -> str:
        """Tells dialogues apart in a log."""
        content = json.dumps([self.ids, self.dialogue.summary])
        return f"{self.dialogue.id} {hashlib.sha256(content.encode()).hexdigest()[:16]}"


def ask_all(
    model: BuddyForCausalLM,
    tokenizer: Any,
    dialogues: Sequence[Dialogue],
    config: RougeConfig,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[list[DialoguePrompt]]:
    """Prompts in batches of like length, the longest first; variables are the chat template's.

    Raises:
        PromptError: The model's context does not hold one of them and its answer.
    """
    prompts = [DialoguePrompt(own, prompt_ids(tokenizer, own.text, variables)) for own in dialogues]
    prompts.sort(key=lambda prompt: len(prompt.ids), reverse=True)
    longest, limit = prompts[0], model.config.max_position_embeddings
    if len(longest.ids) + config.max_new_tokens - 1 > limit:
        raise PromptError(
            f"dialogue {longest.dialogue.id} makes a prompt of {len(longest.ids)} tokens, and with "
            f"{config.max_new_tokens} new ones the model's context of {limit} does not hold it: "
            "ask for fewer new tokens, or take another model"
        )
    starts = range(0, len(prompts), config.batch)
    return [prompts[start : start + config.batch] for start in starts]


def run_rouge(
    model: BuddyForCausalLM,
    tokenizer: Any,
    conditions: Sequence[Condition],
    batches: Sequence[Sequence[DialoguePrompt]],
    config: RougeConfig,
    *,
    score: Scorer | None = None,
    thinking_ends: int | None = None,
    log: SampleLog | None = None,
    on_answers: Callable[[Condition, int], None] = lambda condition, answers: None,
) -> dict[str, Any]:
    """Answer every dialogue under every condition, both ways.

    Args:
        model: Runs the blocks.
        tokenizer: Its own.
        conditions: One after another.
        batches: From `ask_all`.
        config: As for `ask_all`.
        score: In place of `rouge-score`.
        thinking_ends: The token that ends thinking, where it may come; a condition with a budget
            for thinking knows it.
        log: Keeps each answer, and gives back those it has.
        on_answers: Told of each batch done.

    Returns:
        `points`, `differences` and `execution`: see `rouge_points`.
    """
    score = score or rouge_scorer()
    end_at_turns(model, tokenizer)
    results: dict[str, Any] = {"points": [], "differences": [], "execution": []}
    for condition in conditions:
        # The weights are shared; the caller's model keeps its policy.
        routed = BuddyForCausalLM(
            model.model,
            policy=condition.policy,
            kv_policy=config.kv_policy or model.kv_policy,
            engine=model.executor.engine,
        )
        if config.thinking_tokens is not None:
            routed.thinking_marks = model.thinking_marks
        marks = condition.budget.marks
        ends = thinking_ends if marks is None else marks.close_token
        answerer = _Answerer(routed, tokenizer, condition, config, score, ends, log)
        answers: dict[Way | None, list[Answer]] = {way: [] for way in ways_of(condition)}
        for way, answers_so_far in answers.items():
            for batch, found in zip(batches, answerer.answers(batches, way), strict=True):
                answers_so_far += found
                on_answers(condition, len(batch))
        for part, entries in to_results(condition, answers).items():
            results[part] += entries
    return results


@dataclass(frozen=True, slots=True)
class _Answerer:
    """Answers batches under one condition, which the processes of the log share."""

    model: BuddyForCausalLM
    tokenizer: Any
    condition: Condition
    config: RougeConfig
    score: Scorer
    thinking_ends: int | None
    log: SampleLog | None

    def answers(
        self, batches: Sequence[Sequence[DialoguePrompt]], way: Way | None
    ) -> Iterator[list[Answer]]:
        """The answers of each batch, logged or made now; half a batch is made again whole.

        An answer can depend on its batch, by the order of a sum; so it must not depend on where
        a run was interrupted.
        """
        logged = [self._logged(batch, way) for batch in batches]
        missing = [batch for batch, found in zip(batches, logged, strict=True) if found is None]
        ranks = ALONE if self.log is None else self.log.ranks
        made = ranks.share(missing, lambda batch: self._generate(batch, way))
        for batch, found in zip(batches, logged, strict=True):
            if found is not None:
                yield found
                continue
            new = next(made)
            if self.log is not None:
                for asked, answer in zip(batch, new, strict=True):
                    self.log.add(self._key(asked, way), **asdict(answer.to_log()))
            yield new

    def _key(self, asked: DialoguePrompt, way: Way | None) -> str:
        return f"{self.condition.key} {way} {asked.mark}"

    def _logged(self, batch: Sequence[DialoguePrompt], way: Way | None) -> list[Answer] | None:
        """What the log has of a batch; None unless it has all."""
        keys = [self._key(asked, way) for asked in batch]
        logged = [None if self.log is None else self.log.find(key, Logged) for key in keys]
        whole = [Answer.from_log(entry) for entry in logged if entry is not None]
        return whole if len(whole) == len(batch) else None

    def _generate(self, batch: Sequence[DialoguePrompt], way: Way | None) -> list[Answer]:
        pad = self.tokenizer.pad_token_id or 0
        ids, mask = _left_padded([asked.ids for asked in batch], pad)
        trace = DepthTrace()
        out = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            budget=self.condition.source,
            reroute=way or "prefill",
            trace=trace,
            max_new_tokens=self.config.max_new_tokens,
            thinking_tokens=self.config.thinking_tokens,
            pad_token_id=pad,
            do_sample=False,
            repetition_penalty=None,
        )
        ends = set(token_numbers(self.model.generation_config.eos_token_id))
        # What a row runs after its end is for the other rows' sake.
        written = [_until(tokens, ends) for tokens in out[:, ids.shape[1] :].tolist()]
        budget, prompts = self.condition.budget, [asked.ids for asked in batch]
        phases = count_phases(budget, trace, prompts, written)
        answers = []
        for row, tokens in enumerate(written):
            text = read_answer(self.tokenizer, _after(tokens, self.thinking_ends))
            plans = Counter(step.plans[row] for step in trace.steps[: len(tokens)])
            scores = self.score(batch[row].dialogue.summary, text)
            answers.append(Answer(text, scores, dict(plans), phases[row]))
        return answers


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """Tokens up to the first end, included."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]


def _after(tokens: list[int], mark: int | None) -> list[int]:
    """Tokens after the last mark; all where there is none."""
    ends = [place + 1 for place, token in enumerate(tokens) if token == mark]
    return tokens[ends[-1] :] if ends else tokens


def _left_padded(
    rows: Sequence[list[int]], pad: int
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)
