"""The fit of the classifier: mean squared error on the answers' log-likelihoods."""

import copy
import math
import random
from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from buddy.drawn import drawn_by
from buddy.methods.pudding.policy import PuddingClassifier, PuddingConfig
from buddy.methods.pudding.recipe import FitSettings
from buddy.methods.pudding.targets import Targets
from buddy.training.summaries import Standard


class PuddingFit:
    """Takes steps; every step depends on the settings, the targets and its number alone.

    The classifier learns from standardised summaries, and its outputs start at the mean of the
    targets: from what is best for all prompts alike.

    Args:
        config: Sets and sizes.
        targets: Of the training rows.
        settings: Of the optimiser.

    Attributes:
        steps: Steps of the run.
        parameters: What is trained, by name.
    """

    def __init__(self, config: PuddingConfig, targets: Targets, settings: FitSettings) -> None:
        self._targets, self._settings = targets, settings
        with drawn_by(settings.seed):
            self._part = PuddingClassifier(config)
        with torch.no_grad():
            self._part.up.bias.copy_(targets.log_likelihoods.mean(0).flatten())
        self._standard = Standard.of(targets.summaries)
        self._summaries = self._standard(targets.summaries)
        self._per_epoch = math.ceil(len(targets) / settings.batch_size)
        self.steps = settings.epochs * self._per_epoch
        self.parameters = dict(self._part.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), settings.learning_rate, weight_decay=settings.weight_decay
        )

    def step(self, step: int) -> float:
        """Take one step, counted from 0; its mean squared error, nats squared."""
        rows = self._rows(step)
        share = min(1.0, (step + 1) / max(1, self._settings.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * share
        wanted = self._targets.log_likelihoods[rows]
        loss = nn.functional.mse_loss(self._part(self._summaries[rows]), wanted)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self.optimizer.step()
        return float(loss.detach())

    def _rows(self, step: int) -> Int[Tensor, " batch"]:
        epoch, place = divmod(step, self._per_epoch)
        order = list(range(len(self._targets)))
        random.Random(self._settings.seed * 1_000_003 + epoch).shuffle(order)
        size = self._settings.batch_size
        return torch.tensor(order[place * size : (place + 1) * size])

    def classifier(self) -> PuddingClassifier:
        """The classifier as it is now, ready for summaries that are not standardised."""
        ready = copy.deepcopy(self._part).eval()
        self._standard.fold(ready.down)
        return ready


@dataclass(frozen=True, slots=True)
class FitEvaluation:
    """What the classifier's choices are worth at one depth, on rows it has not learned from.

    Log-likelihoods are means over rows, nats per token.

    Attributes:
        blocks: The depth.
        chosen: By set, how many rows it was chosen for.
        log_likelihood: Under the chosen sets.
        constant: Under the set that is best over all training rows.
        best: Under the set that is best for each row, as only its answer tells.
        error: Mean squared error of what was predicted, nats squared.
    """

    blocks: int
    chosen: dict[int, int]
    log_likelihood: float
    constant: float
    best: float
    error: float


@torch.no_grad()
def evaluate_fit(
    part: PuddingClassifier, trained_on: Targets, held_out: Targets
) -> list[FitEvaluation]:
    """What the classifier's choices are worth, by depth."""
    predicted, measured = part(held_out.summaries), held_out.log_likelihoods
    means = trained_on.log_likelihoods.mean(0)  # [depths, sets]
    evaluations = []
    for place, blocks in enumerate(part.config.depths):
        choice = predicted[:, place].argmax(1)
        real = measured[:, place]
        evaluations.append(
            FitEvaluation(
                blocks=blocks,
                chosen=dict(sorted(Counter(choice.tolist()).items())),
                log_likelihood=float(real.gather(1, choice[:, None]).mean()),
                constant=float(real[:, means[place].argmax()].mean()),
                best=float(real.max(1).values.mean()),
                error=float((predicted[:, place] - real).square().mean()),
            )
        )
    return evaluations
