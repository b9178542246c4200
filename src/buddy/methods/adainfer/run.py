"""AdaInfer's fit: features and labels at full depth, a classifier for each block, the threshold."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.checkpoint.card import Card
from buddy.data.examples import Example
from buddy.errors import DataError, RecipeError
from buddy.methods.adainfer.logistic import cross_validated, fit_logistic
from buddy.methods.adainfer.policy import (
    AdaInferClassifier,
    AdaInferConfig,
    AdaInferPolicy,
    logit_features,
)
from buddy.methods.adainfer.recipe import AdaInferRecipe
from buddy.methods.threshold import find_threshold, mean_depth
from buddy.model import BuddyForCausalLM
from buddy.training.batches import check_context, collate, draw_rows
from buddy.training.card import base_facts
from buddy.training.fast import fast_passes
from buddy.training.packing import PackedRun, begin_pass
from buddy.training.run import Run, RunListener

_BATCH: Final = 8
_AT_ONCE: Final = 128
"""Tokens whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class ExitFeatures:
    """What answer tokens look like before each block that may be left at.

    Attributes:
        features: [tokens, exits, features].
        settled: [tokens, exits], whether the best token there is the last block's.
        rows: Of each token, the row that it is of.
    """

    features: Float[Tensor, "tokens exits features"]
    settled: Bool[Tensor, "tokens exits"]
    rows: Int[Tensor, " tokens"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """How well one block's classifier tells.

    Attributes:
        block: That would run next.
        settled: Share of tokens that had settled before it.
        accuracy: Cross-validated share of tokens told right.
        loss: Cross-validated, in nats.
    """

    block: int
    settled: float
    accuracy: float
    loss: float


@torch.no_grad()
def collect_exit_features(
    model: BuddyForCausalLM,
    examples: Sequence[Example],
    first_exit: int,
    *,
    tokens: int,
    seed: int,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> ExitFeatures:
    """Run rows at full depth, and look at answer tokens before each block from `first_exit` on.

    Args:
        model: At full depth, whatever its policy.
        examples: In any order.
        first_exit: First block that may be left at.
        tokens: As many are drawn, or all.
        seed: Of the draw.
        on_rows: Told of rows done.
    """
    total = sum(len(example.answer) for example in examples)
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=draw)[:tokens]] = True
    batches: list[tuple[Tensor, Tensor, Tensor]] = []
    begun = 0
    for start in range(0, len(examples), _BATCH):
        batch = collate(examples[start : start + _BATCH], model.device)
        mine = chosen[begun : begun + len(batch.targets)].to(model.device)
        begun += len(batch.targets)
        rows, columns = batch.rows[mine], batch.columns[mine]
        features, best = [], []
        with fast_passes(model.backbone):
            run = begin_pass(PackedRun, model.backbone, batch)
            run.blocks(range(first_exit), None)
            for block in range(first_exit, model.num_blocks + 1):
                hidden = run.hidden.view(*batch.token_ids.shape, -1)[rows, columns]
                seen = _features_and_best(model.backbone, hidden)
                features.append(seen[0])
                best.append(seen[1])
                if block < model.num_blocks:
                    run.blocks(range(block, block + 1), None)
        settled = torch.stack([token == best[-1] for token in best[:-1]], 1)
        batches.append((torch.stack(features[:-1], 1).cpu(), settled.cpu(), (rows + start).cpu()))
        on_rows(min(len(examples), start + _BATCH))
    return ExitFeatures(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def _features_and_best(
    backbone: Backbone, hidden: Float[Tensor, "tokens hidden"]
) -> tuple[Float[Tensor, "tokens features"], Int[Tensor, " tokens"]]:
    """Features and best tokens of residuals."""
    features, best = [hidden.new_zeros(0, 2).float()], [hidden.new_zeros(0).long()]
    for part in torch.split(hidden, _AT_ONCE) if len(hidden) else ():
        logits = backbone.logits(part)
        features.append(logit_features(logits))
        best.append(logits.argmax(-1))
    return torch.cat(features), torch.cat(best)


def fit_classifier(
    exits: ExitFeatures,
    config: AdaInferConfig,
    *,
    folds: int,
    ridge: float,
    on_fitted: Callable[[Fitted], None] = lambda fitted: None,
) -> tuple[AdaInferClassifier, list[Fitted]]:
    """A logistic classifier for each block that may be left at, and how well each tells.

    The paper has a support vector machine. A logistic fit gives probabilities, so that one
    threshold means the same before every block.

    Raises:
        DataError: The tokens are all of one row, so that nothing is left to validate on.
    """
    if len(set((exits.rows % folds).tolist())) < 2:
        raise DataError(
            "the classifiers are validated on rows that they were not fitted on: expected answer "
            "tokens of 2 rows or more; add rows to data.train"
        )
    classifier, fitted = AdaInferClassifier(config), []
    for place in range(config.num_blocks - config.first_exit):
        block, features = config.first_exit + place, exits.features[:, place]
        settled = exits.settled[:, place]
        linear = fit_logistic(features, settled, ridge)
        with torch.no_grad():
            classifier.weight[block] = linear.weight.float()
            classifier.bias[block] = linear.bias.float()
        accuracy_and_loss = cross_validated(features, settled, exits.rows, folds, ridge)
        fitted.append(Fitted(block, float(settled.float().mean()), *accuracy_and_loss))
        on_fitted(fitted[-1])
    return classifier, fitted


def train_adainfer(
    recipe: AdaInferRecipe, out: Path, *, resume: bool = False, listener: RunListener | None = None
) -> Path:
    """Fit AdaInfer's classifiers by a recipe.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/` and the record.
        resume: A fit keeps no state, so it begins again.
        listener: Told how it goes.

    Returns:
        The Buddy checkpoint's folder.

    Raises:
        RecipeError: A setting does not fit the model.
        DataError: A data file is missing, empty or malformed.
        TrainingError: No threshold has the mean depth, or the run cannot begin.
    """
    run, settings = Run(recipe, out, resume=resume, listener=listener), recipe.classifier
    config = _check(recipe, BuddyForCausalLM.outline(run.named))
    model, rows = run.load_model(policy="full"), run.read_rows()
    run.warn(rows.left_out)
    with run.claimed():
        exits = collect_exit_features(
            model,
            rows.train,
            config.first_exit,
            tokens=settings.tokens,
            seed=settings.seed,
            on_rows=lambda done: run.listener.measured("full depth", done, len(rows.train)),
        )
        run.listener.started(0, config.num_blocks - config.first_exit)

        def tell(fitted: Fitted) -> None:
            run.listener.stepped(fitted.block - config.first_exit + 1, {"loss": fitted.loss})
            run.listener.reported(
                f"before block {fitted.block}: {fitted.settled:.1%} of tokens have settled, "
                f"{fitted.accuracy:.1%} told right"
            )

        classifier, fits = fit_classifier(
            exits, config, folds=settings.folds, ridge=settings.ridge, on_fitted=tell
        )
        drawn = draw_rows(rows.validation or rows.train, settings.depth_rows, settings.seed)
        threshold, depth = _threshold(model, classifier, drawn, run)
        classifier.config = replace(config, threshold=threshold)
        model.put_part(classifier)
        model.card = _card(recipe, len(exits.rows), threshold, depth)
        return run.finish(
            model,
            kind="training",
            rows=rows,
            config={"method": AdaInferClassifier.policy},
            results={
                "tokens": len(exits.rows),
                "rows": len(rows.train),
                "classifiers": [asdict(fitted) for fitted in fits],
                "threshold": threshold,
                "mean_blocks": depth,
            },
        )


def _check(recipe: AdaInferRecipe, outline: BuddyForCausalLM) -> AdaInferConfig:
    """Refuse what does not fit the model, before weights are fetched."""
    check_context(recipe.data.max_tokens, outline)
    settings, num_blocks = recipe.classifier, outline.num_blocks
    if settings.first_exit >= num_blocks:
        raise RecipeError(
            f"classifier.first_exit must be below the model's {num_blocks} blocks, got "
            f"{settings.first_exit}"
        )
    wanted = settings.wanted_depth(num_blocks)
    least, most = settings.first_exit - settings.tolerance, num_blocks + settings.tolerance
    if wanted is not None and not least <= wanted <= most:
        raise RecipeError(
            f"classifier.mean_depth must be from {settings.first_exit} blocks, the first exit, to "
            f"the model's {num_blocks}, got {wanted:g}: set it, or classifier.first_exit"
        )
    if outline.learned is not None and not isinstance(outline.learned, AdaInferClassifier):
        raise RecipeError(
            f"model.name: {recipe.model.name} has a trained part of policy "
            f"{outline.learned.policy!r}, which a fit would replace: name its base model"
        )
    return AdaInferConfig(
        num_blocks=num_blocks, first_exit=settings.first_exit, threshold=settings.threshold
    )


def _threshold(
    model: BuddyForCausalLM,
    classifier: AdaInferClassifier,
    rows: Sequence[Example],
    run: Run[AdaInferRecipe],
) -> tuple[float, float]:
    """The threshold, given or searched, and its mean depth on these rows."""
    settings = run.recipe.classifier
    wanted = settings.wanted_depth(model.num_blocks)

    def depth_at(threshold: float) -> float:
        policy = AdaInferPolicy(classifier, model.backbone, threshold)
        depth = mean_depth(model, policy, rows)
        run.listener.reported(f"threshold {threshold:.6f}: {depth:.2f} blocks a token")
        return depth

    if wanted is None:
        return settings.threshold, depth_at(settings.threshold)
    return find_threshold(
        depth_at,
        wanted,
        least=float(settings.first_exit),
        most=float(model.num_blocks),
        tolerance=settings.tolerance,
    )


def _card(recipe: AdaInferRecipe, tokens: int, threshold: float, depth: float) -> Card:
    text = f"""\
# A Buddy checkpoint

Each token of `{recipe.model.name}` stops at the block before which a classifier is sure of it
(AdaInfer). The weights are those of the base model.

## Fit

Logistic classifiers on {tokens:,} answer tokens; a token stops above a probability of
{threshold:.6f}, which runs {depth:.2f} blocks on average on the recipe's rows. `record.json` beside
this folder has every setting.
"""
    return Card(text=text, facts=base_facts(recipe.model.name))
