"""A run from a recipe to a checkpoint with a ledger, and to what the ledger gains."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from buddy.budget.blocks import check_spendable
from buddy.checkpoint.resolve import load_tokenizer
from buddy.data.examples import Example, check_source, read_all
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.records import RunRecord
from buddy.training.batches import check_context
from buddy.training.ledger.fit import fit_ledger
from buddy.training.ledger.measure import measure_depths, measure_levels
from buddy.training.ledger.recipe import LedgerRecipe
from buddy.training.state import CHECKPOINT, RECORD, check_folder, make_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerListener:
    """Whom a run tells how it goes."""

    measured: Callable[[str, int, int], None] = lambda what, done, of: None
    """Training rows or means that are done, and how many there are."""
    found: Callable[[dict[str, Any]], None] = lambda one: None
    """What was found at one mean."""
    warned: Callable[[str], None] = lambda text: None
    """When rows are left out."""


def train_ledger(
    recipe: LedgerRecipe, out: Path, *, listener: LedgerListener | None = None
) -> Path:
    """Fit a ledger to a checkpoint.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/` and the record.
        listener: Told how it goes.

    Returns:
        The new checkpoint's folder: the old one, and the ledger.

    Raises:
        RecipeError: A setting does not fit the model.
        ModelError: The checkpoint cannot be loaded.
        DataError: A data file is missing, empty or malformed.
    """
    listener, settings = listener or LedgerListener(), recipe.ledger
    check_folder(out, resume=True)
    for source in (*recipe.data.train, *recipe.data.validation):
        check_source(source)
    model = BuddyForCausalLM.from_pretrained(
        recipe.model.name, dtype=getattr(torch, recipe.model.dtype)
    )
    model.eval().requires_grad_(False)
    check_context(recipe.data.max_tokens, model)
    prompt = _check_levels(recipe, model)
    tokenizer, left_out = load_tokenizer(recipe.model.name), list[str]()
    examples, held_out = (
        read_all(sources, tokenizer, max_tokens=recipe.data.max_tokens, note=left_out.append)
        for sources in (recipe.data.train, recipe.data.validation)
    )
    for note in left_out:
        listener.warned(note)
    _check_answers(examples, held_out)
    answers = measure_levels(
        model,
        examples,
        settings.levels,
        prompt,
        batch_size=settings.batch_size,
        on_rows=lambda done: listener.measured("training answers", done, len(examples)),
    )
    model.ledger = fit_ledger(answers, settings)
    found = _evaluate(model, held_out, prompt, recipe, listener) if held_out else []
    # Loaded again: a backbone that is written must be in the dtype that it was saved in.
    whole = BuddyForCausalLM.from_pretrained(recipe.model.name, device="cpu")
    whole.ledger = model.ledger
    make_folder(out)
    whole.save_pretrained(out / CHECKPOINT, tokenizer=None if whole.origin.source else tokenizer)
    record = RunRecord(
        kind="training-ledger",
        model=whole.facts(),
        config={**asdict(recipe), "num_blocks": model.num_blocks, "prompt_blocks": prompt},
        results={
            "rows": len(examples),
            "tokens": sum(len(one.token_ids) for one in answers),
            "left_out": left_out,
            "losses": model.ledger.losses.tolist(),
            "prices": model.ledger.prices.tolist(),
            "known_tokens": model.ledger.config.tokens,
            "evaluation": found,
        },
    )
    record.save(out / RECORD)
    return out / CHECKPOINT


def _check_levels(recipe: LedgerRecipe, model: BuddyForCausalLM) -> int:
    """Refuse levels that the model cannot run; returns the blocks of a prompt."""
    levels, policy = recipe.ledger.levels, model.scoring_policy
    prompt = model.num_blocks if recipe.ledger.prompt is None else recipe.ledger.prompt
    too_deep = [blocks for blocks in (*levels, prompt) if blocks > model.num_blocks]
    if too_deep:
        raise RecipeError(
            f"ledger: {too_deep[0]} blocks, and {recipe.model.name} has {model.num_blocks}"
        )
    check_spendable({*levels, prompt}, model.num_blocks, policy.pinned)
    return prompt


def _check_answers(examples: list[Example], held_out: list[Example]) -> None:
    """Refuse rows that tell nothing, before any is measured: an answer's first token is not fed."""
    longer, tested = (sum(len(one.answer) > 1 for one in rows) for rows in (examples, held_out))
    if longer < 2:
        raise RecipeError(
            f"data.train has {longer} answers of two tokens or more, and a ledger is fitted to 2 "
            "at least: add rows"
        )
    if held_out and not tested:
        raise RecipeError(
            "data.validation has no answer of two tokens or more, so it tells nothing of a "
            "ledger: add rows, or leave it out"
        )


def _evaluate(
    model: BuddyForCausalLM,
    examples: list[Example],
    prompt: int,
    recipe: LedgerRecipe,
    listener: LedgerListener,
) -> list[dict[str, Any]]:
    """Ledger and constant depth on the same answers, at each mean; differences are paired."""
    ledger = model.ledger
    assert ledger is not None
    means = recipe.means or ledger.config.means
    found, size = [], recipe.ledger.batch_size
    constant = measure_levels(model, examples, means, prompt, batch_size=size)
    for place, mean in enumerate(means):
        spend = ledger.budget(Fraction(mean)).levels
        lost, ran = measure_depths(model, examples, spend, prompt, batch_size=size)
        flat = [float(one.losses[:, place].sum(dtype=np.float64)) for one in constant]
        tokens = np.array([len(one) for one in ran])
        gain = np.array(lost) - np.array(flat)
        # Of a ratio of sums: answers are drawn, tokens come with them.
        apart = gain - gain.sum() / tokens.sum() * tokens
        one = {
            "mean": mean,
            "constant": sum(flat) / tokens.sum(),
            "ledger": sum(lost) / tokens.sum(),
            "difference": gain.sum() / tokens.sum(),
            "stderr": float(np.sqrt((apart**2).sum()) / tokens.sum()),
            "blocks": sum(map(sum, ran)) / tokens.sum(),
            "answers": len(ran),
            "tokens": int(tokens.sum()),
        }
        found.append(one)
        listener.measured("means", place + 1, len(means))
        listener.found(one)
    return found
