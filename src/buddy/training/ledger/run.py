"""The ledger from its recipe to a checkpoint, and to what the ledger gains."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from buddy.data.examples import Example
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.routing.ledger import Ledger
from buddy.training.answer_losses import Losses
from buddy.training.batches import check_context
from buddy.training.fast import fast_passes
from buddy.training.ledger.fit import fit_ledger
from buddy.training.ledger.measure import Way, fed, fed_losses, ledger_identity, level_losses
from buddy.training.ledger.recipe import LedgerRecipe
from buddy.training.measurements import Measurements
from buddy.training.run import Rows, Run, RunListener
from buddy.training.workers import Workers


def train_ledger(
    recipe: LedgerRecipe, out: Path, *, resume: bool = False, listener: RunListener | None = None
) -> Path:
    """Fit a ledger to a checkpoint.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/` and the record.
        resume: Without effect: what was measured always goes on.
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
    with run.claimed(), fast_passes(model.backbone):
        measurements = Measurements(run, model, Workers(model.device), settings.batch_size)
        fitted = fed(rows.train)
        answers = level_losses(
            measurements, "measuring training answers", model, fitted, settings.levels, prompt
        )
        ledger = fit_ledger(answers, settings)
        means = recipe.means or ledger.config.means if rows.validation else ()
        evaluation = _evaluate(measurements, ledger, fed(rows.validation), means, prompt)
        whole = run.load_as_saved()
        whole.ledger = ledger
        return run.finish(
            whole,
            kind="training-ledger",
            rows=rows,
            config={"num_blocks": model.num_blocks, "prompt_blocks": prompt},
            results={
                "rows": len(rows.train),
                "tokens": sum(len(answer.token_ids) for answer in answers),
                "losses": ledger.losses.tolist(),
                "prices": ledger.prices.tolist(),
                "known_tokens": ledger.config.tokens,
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
    measurements: Measurements,
    ledger: Ledger,
    rows: Sequence[Example],
    means: Sequence[int],
    prompt: int,
) -> list[dict[str, Any]]:
    """Ledger and constant depth on the same answers, at each mean; differences are paired."""
    if not means:
        return []
    model, run = measurements.model, measurements.run
    spends = [ledger.budget(Fraction(mean)).levels for mean in means]
    ways = [
        *(Way.level(model, prompt, mean) for mean in means),
        *(Way(model, prompt, spend) for spend in spends),
    ]
    facts = {"means": list(means), "prompt": prompt, "ledger": ledger_identity(ledger)}
    lost = fed_losses(measurements, "measuring validation answers", rows, ways, facts).sum(1)
    tokens = torch.tensor([len(row.answer) - 1 for row in rows], dtype=torch.float64)
    each, evaluations = Losses(lost, tokens).mean.tolist(), []
    for place, (mean, spend) in enumerate(zip(means, spends, strict=True)):
        flat, spent = lost[:, place], lost[:, [len(means) + place]]
        difference, stderr = Losses(spent, tokens).behind(flat)
        ran = sum(sum(spend(row.answer[:-1])) for row in rows)
        at_mean = {
            "mean": mean,
            "constant": each[place],
            "ledger": each[len(means) + place],
            "difference": float(difference),
            "stderr": float(stderr),
            "blocks": ran / float(tokens.sum()),
            "answers": len(rows),
            "tokens": int(tokens.sum()),
        }
        evaluations.append(at_mean)
        run.listener.reported(
            f"mean {mean:2d} blocks  constant {at_mean['constant']:.3f}  ledger "
            f"{at_mean['ledger']:.3f} at {at_mean['blocks']:.2f}  difference "
            f"{at_mean['difference']:+.3f} ± {at_mean['stderr']:.3f}"
        )
    return evaluations
