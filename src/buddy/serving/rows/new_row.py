"""A request that waited gets what its row is made of."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from buddy.budget.thinking import ThinkingWatch
from buddy.generation.text_drafter import TextDrafter
from buddy.inference import InferenceModel
from buddy.serving.request import GenerationRequest
from buddy.serving.rows.row import Row, Submitted
from buddy.serving.rows.sampler import Picker
from buddy.serving.rows.scoring import PromptScorer
from buddy.serving.rows.text import StopStrings, TokenText


def make_row(
    submitted: Submitted, model: InferenceModel, tokenizer: Any, ends: frozenset[int]
) -> Row:
    """A row of which nothing has been fed.

    Args:
        submitted: The request.
        model: Chooses the budget `auto`, and knows how a mean is spent.
        tokenizer: The model's.
        ends: Tokens that end an answer.
    """
    request, prompt = submitted.request, np.array(submitted.request.prompt, np.int64)
    scorer, top = None, request.prompt_logprobs
    if top is not None:
        scorer = PromptScorer(prompt, min(top, model.backbone.vocab))
    return Row(
        submitted=submitted,
        picker=Picker(
            request.sampling,
            request.prompt,
            request.top_logprobs,
            submitted.grammar,
            ends=ends | request.stop_tokens,
            min_tokens=request.min_tokens,
            thinking=_watch(request),
        ),
        text=TokenText(
            tokenizer, request.prompt if request.continues else (), request.shown_tokens
        ),
        stop=StopStrings(request.stop),
        wanted=request.budget.wanted(lambda: _choose(model, request.prompt)),
        budget_source=request.budget.token_source(model.ledger),
        prompt=prompt,
        drafter=_drafter(request, model.num_blocks),
        scorer=scorer,
    )


def _drafter(request: GenerationRequest, num_blocks: int) -> TextDrafter | None:
    """Who drafts for it; None where nobody does. Its depth may change at a mark of thinking."""
    drafts, marks = request.drafts, request.budget.marks
    if not drafts:
        return None
    return TextDrafter(
        request.prompt,
        ngrams=drafts.ngrams,
        blocks=None if drafts.budget is None else drafts.budget.blocks(num_blocks),
        never=() if marks is None else (marks.open_token, marks.close_token),
    )


def _watch(request: GenerationRequest) -> ThinkingWatch | None:
    """Who says when its thinking is to end; None where it may take any time."""
    limit = request.thinking
    if limit is None:
        return None
    return ThinkingWatch(limit, limit.marks.is_open(request.prompt))


def _choose(model: InferenceModel, prompt: Sequence[int]) -> int:
    """Blocks that the Budget Predictor chooses for a prompt."""
    ids = torch.tensor([prompt], device=model.backbone.device)
    real = torch.ones_like(ids, dtype=torch.bool)
    (blocks,) = model.choose_budgets(ids, real, real)
    return blocks
