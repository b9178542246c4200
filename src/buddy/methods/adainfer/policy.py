"""AdaInfer: before each block, two features of a token's logits say whether it has settled."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.depth.policy import (
    LaneMask,
    LaneResidual,
    NewTokens,
    OnlinePolicy,
    PolicyResources,
)
from buddy.depth.wide import widened
from buddy.errors import PolicyError
from buddy.methods.threshold import read_threshold
from buddy.policies.learned import LearnedPart, need_part
from buddy.settings import Range, check_ranges

NUM_FEATURES: Final = 2
_AT_ONCE: Final = 128
"""Tokens whose logits are held at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaInferConfig:
    """What gives the classifier its shapes, and the threshold that it decides by.

    Raises:
        PolicyError: A setting is out of its range, or the first exit is beyond the last block.
    """

    num_blocks: Annotated[int, Range(2, 10_000)]
    """Blocks of the model."""
    first_exit: Annotated[int, Range(1, 10_000)]
    """Fewest blocks that run: the first check stands before this block."""
    threshold: Annotated[float, Range(0, 1)] = 0.9
    """A token stops where its probability of having settled is above it; 1 stops none."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)
        if self.first_exit >= self.num_blocks:
            raise PolicyError(
                f"first_exit must be below num_blocks, {self.num_blocks}, got {self.first_exit}: "
                "no block is left to skip"
            )


class AdaInferClassifier(LearnedPart):
    """A linear classifier for each block: has the token settled on what the last block would say?

    Args:
        config: Its settings.

    Attributes:
        weight: [blocks, features]; those of blocks before `first_exit` are not used.
        bias: [blocks].
    """

    policy: ClassVar[str] = "adainfer"
    settings: ClassVar[type[Any]] = AdaInferConfig

    def __init__(self, config: AdaInferConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(config.num_blocks, NUM_FEATURES))
        self.bias = nn.Parameter(torch.zeros(config.num_blocks))

    def settled(
        self, block: int, features: Float[Tensor, "lanes features"]
    ) -> Float[Tensor, " lanes"]:
        """Probability that the best token before a block is the best token after the last one.

        Args:
            block: That would run next.
            features: As `logit_features` makes them of the residual that would enter it.
        """
        score = widened(features) @ widened(self.weight[block]) + widened(self.bias[block])
        return score.sigmoid()


def logit_features(logits: Float[Tensor, "lanes vocab"]) -> Float[Tensor, "lanes features"]:
    """Gap between the two best probabilities, and the best one."""
    wide = logits.float()
    first, second = (wide.topk(2, dim=-1).values - wide.logsumexp(-1, keepdim=True)).exp().unbind(1)
    return torch.stack([first - second, first], 1)


@dataclass(slots=True)
class Stopped:
    """What a pass remembers: the tokens that run no further block."""

    lanes: LaneMask


class AdaInferPolicy(OnlinePolicy):
    """Stops each token for itself; a token that has stopped skips all further blocks of its pass.

    Each check reads the whole output projection, for the tokens that still run. Tokens of a
    prompt are checked one by one as those of an answer are, so that a text costs and gives the
    same in one pass and in many.

    Args:
        classifier: As it was fitted.
        backbone: The model, for its final norm and output projection.
        threshold: In the place of the classifier's own.

    Source: AdaInfer (Fan et al., 2024), as far as its abstract says; the rest is recalled. Ours
    are the logistic classifier in the place of an SVM, and a decision for each token.
    """

    name = "adainfer"

    def __init__(
        self, classifier: AdaInferClassifier, backbone: Any, threshold: float | None = None
    ) -> None:
        config: AdaInferConfig = classifier.config
        super().__init__(config.num_blocks)
        self.governed = range(config.first_exit, config.num_blocks)
        self.threshold = config.threshold if threshold is None else threshold
        self._classifier, self._backbone = classifier, backbone

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "AdaInferPolicy":
        """Make it from `adainfer`, or from `adainfer:THRESHOLD`, as in `adainfer:0.8`."""
        meaning = "a probability from 0 to 1"
        threshold = read_threshold(argument, cls.name, meaning) if argument else None
        part = need_part(AdaInferClassifier, resources)
        return cls(part, resources.backbone, threshold)

    def begin(self, new: NewTokens) -> Stopped:
        """All tokens run."""
        return Stopped(torch.zeros(len(new), dtype=torch.bool, device=new.sequence.device))

    @torch.no_grad()
    def keep(self, state: Stopped, block: int, hidden: LaneResidual) -> LaneMask:
        """The tokens that have not stopped, now that this residual has been looked at."""
        running = (~state.lanes).nonzero()[:, 0]
        for part in torch.split(running, _AT_ONCE) if len(running) else ():
            logits = self._backbone.logits(hidden[part].to(self._backbone.dtype))
            settled = self._classifier.settled(block, logit_features(logits))
            state.lanes[part] = settled > self.threshold
        return ~state.lanes

    def describe(self) -> str:
        """A few words for a summary line."""
        return f"AdaInfer, stops above {self.threshold:g}"
