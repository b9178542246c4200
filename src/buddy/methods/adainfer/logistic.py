"""Logistic regression on a few features, and its accuracy on folds that it was not fitted on."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


@dataclass(frozen=True, slots=True)
class Linear:
    """A score: features times weights, plus a bias.

    Attributes:
        weight: [features].
        bias: [].
    """

    weight: Float[Tensor, " features"]
    bias: Float[Tensor, ""]

    def scores(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, " rows"]:
        """Log-odds."""
        return features.double() @ self.weight + self.bias


def fit_logistic(
    features: Float[Tensor, "rows features"], labels: Bool[Tensor, " rows"], ridge: float
) -> Linear:
    """The regression of least mean loss and ridge, in float64.

    Features are standardised for the fit, and weights and bias folded back.

    Args:
        features: In any scale; a constant one gets no weight.
        labels: True = the event.
        ridge: Times half of the sum of squared coefficients, the bias included, so that labels
            of one kind have a finite fit.
    """
    wide, target = features.double(), labels.double()
    mean, spread = wide.mean(0), wide.std(0, correction=0).clamp(min=1e-9)
    scaled = (wide - mean) / spread
    fitted = torch.zeros(wide.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [fitted], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        search.zero_grad()
        score = scaled @ fitted[:-1] + fitted[-1]
        value = binary_cross_entropy_with_logits(score, target) + ridge / 2 * fitted.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        search.step(loss)  # type: ignore[no-untyped-call]
    weight = fitted.detach()[:-1] / spread
    return Linear(weight, fitted.detach()[-1] - weight @ mean)


def cross_validated(
    features: Float[Tensor, "rows features"],
    labels: Bool[Tensor, " rows"],
    groups: Int[Tensor, " rows"],
    folds: int,
    ridge: float,
) -> tuple[float, float]:
    """Share of rows told right by a fit on the other folds, and their mean loss in nats.

    Args:
        features: As `fit_logistic` takes them.
        labels: True = the event.
        groups: Rows of one group are in one fold: group g in fold `g % folds`.
        folds: At least 2, with rows in two of them at least.
        ridge: As `fit_logistic` takes it.
    """
    right, lost = 0, 0.0
    fold = groups % folds
    for held_out in sorted(set(fold.tolist())):
        mine = fold == held_out
        fitted = fit_logistic(features[~mine], labels[~mine], ridge)
        scores, target = fitted.scores(features[mine]), labels[mine]
        right += int(((scores > 0) == target).sum())
        lost += float(binary_cross_entropy_with_logits(scores, target.double(), reduction="sum"))
    return right / len(labels), lost / len(labels)
