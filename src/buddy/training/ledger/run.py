"""The ledger from its recipe to a checkpoint, and to what the ledger gains."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from buddy.data.examples import Example
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.training.batches import check_context
from buddy.training.ledger.fit import fit_ledger
from buddy.training.ledger.measure import measure_depths, measure_levels
from buddy.training.ledger.recipe import LedgerRecipe
from buddy.training.run import Rows, Run, RunListener


def train_ledger(
    recipe: LedgerRecipe, out: Path, *, resume: bool = False, listener: RunListener | None = None
) -> Path:
    """Fit a ledger to a checkpoint.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/` and the record.
        resume: A fit keeps no state, so it begins again.
        listener: Told how it goes.

    Returns:
        The new checkpoint's folder: the model that was named, and the ledger.

    Raises:
        RecipeError: A setting does not fit the model.
        ModelError: The checkpoint cannot be loaded.
        DataError: A data file is missing, empty or malformed.
    """
    run, settings = Run(recipe, out, resume=resume, listener=listener), recipe.ledger
    model = run.load_model()
    check_context(recipe.data.max_tokens, model)
    prompt = _check_levels(recipe, model)
    rows = run.read_rows()
    run.warn(rows.left_out)
    _check_answers(rows)
    with run.claimed():
        answers = measure_levels(
            model,
            rows.train,
            settings.levels,
            prompt,
            batch_size=settings.batch_size,
            on_rows=lambda done: run.listener.measured(
                "measuring training answers", done, len(rows.train)
            ),
        )
        model.ledger = fit_ledger(answers, settings)
        evaluation = _evaluate(model, rows.validation, prompt, run) if rows.validation else []
        whole = run.load_as_saved()
        whole.ledger = model.ledger
        return run.finish(
            whole,
            kind="training-ledger",
            rows=rows,
            config={"num_blocks": model.num_blocks, "prompt_blocks": prompt},
            results={
                "rows": len(rows.train),
                "tokens": sum(len(answer.token_ids) for answer in answers),
                "losses": model.ledger.losses.tolist(),
                "prices": model.ledger.prices.tolist(),
                "known_tokens": model.ledger.config.tokens,
                "evaluation": evaluation,
            },
        )


def _check_levels(recipe: LedgerRecipe, model: BuddyForCausalLM) -> int:
    """Refuse levels that the model cannot run; returns the blocks of a prompt."""
    levels, policy = recipe.ledger.levels, model.scoring_policy
    prompt = model.num_blocks if recipe.ledger.prompt is None else recipe.ledger.prompt
    too_deep = [blocks for blocks in (*levels, prompt) if blocks > model.num_blocks]
    if too_deep:
        raise RecipeError(
            f"ledger: {too_deep[0]} blocks, and {recipe.model.name} has {model.num_blocks}"
        )
    policy.check_spendable({*levels, prompt})
    return prompt


def _check_answers(rows: Rows) -> None:
    """Refuse rows that tell nothing, before any is measured: an answer's first token is not fed."""
    fitted, tested = (
        sum(len(example.answer) > 1 for example in examples)
        for examples in (rows.train, rows.validation)
    )
    if fitted < 2:
        raise RecipeError(
            f"data.train has {fitted} answers of two tokens or more, and a ledger is fitted to 2 "
            "at least: add rows"
        )
    if rows.validation and not tested:
        raise RecipeError(
            "data.validation has no answer of two tokens or more, so it tells nothing of a "
            "ledger: add rows, or leave it out"
        )


def _evaluate(
    model: BuddyForCausalLM, examples: list[Example], prompt: int, run: Run[LedgerRecipe]
) -> list[dict[str, Any]]:
    """Ledger and constant depth on the same answers, at each mean; differences are paired."""
    ledger = model.ledger
    assert ledger is not None
    means = run.recipe.means or ledger.config.means
    evaluations, size = [], run.recipe.ledger.batch_size
    constant = measure_levels(model, examples, means, prompt, batch_size=size)
    for place, mean in enumerate(means):
        spend = ledger.budget(Fraction(mean)).levels
        lost, ran = measure_depths(model, examples, spend, prompt, batch_size=size)
        flat = [float(answer.losses[:, place].sum(dtype=np.float64)) for answer in constant]
        tokens = np.array([len(blocks) for blocks in ran])
        gain = np.array(lost) - np.array(flat)
        # Of a ratio of sums: answers are drawn, tokens come with them.
        apart = gain - gain.sum() / tokens.sum() * tokens
        at_mean = {
            "mean": mean,
            "constant": sum(flat) / tokens.sum(),
            "ledger": sum(lost) / tokens.sum(),
            "difference": gain.sum() / tokens.sum(),
            "stderr": float(np.sqrt((apart**2).sum()) / tokens.sum()),
            "blocks": sum(map(sum, ran)) / tokens.sum(),
            "answers": len(ran),
            "tokens": int(tokens.sum()),
        }
        evaluations.append(at_mean)
        run.listener.measured("measuring means", place + 1, len(means))
        run.listener.reported(
            f"mean {mean:2d} blocks  constant {at_mean['constant']:.3f}  ledger "
            f"{at_mean['ledger']:.3f} at {at_mean['blocks']:.2f}  difference "
            f"{at_mean['difference']:+.3f} ± {at_mean['stderr']:.3f}"
        )
    return evaluations
