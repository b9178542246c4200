"""The trained part of a method: what a checkpoint keeps of one beside adapters and the router."""

import importlib
from dataclasses import asdict
from typing import Any, ClassVar, Final, cast

from buddy.errors import CheckpointError, PolicyError
from buddy.routing.float32 import Float32Module
from buddy.settings import build

LEARNED: Final[dict[str, str]] = {
    "adainfer": "buddy.methods.adainfer.policy:AdaInferClassifier",
    "d-llm": "buddy.methods.d_llm.policy:DLLMRouters",
    "dash": "buddy.methods.dash.policy:DashPart",
    "first": "buddy.methods.first.policy:FirstRouters",
    "flexidepth": "buddy.methods.flexidepth.policy:FlexiDepthPart",
    "mixture-of-depths": "buddy.methods.mixture_of_depths.policy:MixtureOfDepthsRouters",
    "pudding": "buddy.methods.pudding.policy:PuddingClassifier",
}
"""Policy -> `module:class` of its trained part; imported only when asked for."""


class LearnedPart(Float32Module):
    """Weights of a method, in float32, and the settings that give them their shapes.

    A class names its policy and the dataclass of its settings, and is made from those alone.

    Args:
        config: A dataclass of plain values with `num_blocks`.

    Attributes:
        policy: As in the registry of policies.
        settings: The dataclass.
    """

    policy: ClassVar[str]
    settings: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def to_json(self) -> dict[str, Any]:
        """Plain values: the policy, and its settings."""
        return {"policy": self.policy, "settings": asdict(self.config)}


def outline_part(policy: str, settings: dict[str, Any], where: str) -> LearnedPart:
    """A trained part without its weights; made under `torch.device("meta")` it takes no memory.

    Raises:
        CheckpointError: There is no such method, or its settings do not fit it.
    """
    target = LEARNED.get(policy)
    if target is None:
        raise CheckpointError(
            f"{where}: no method {policy!r} keeps a trained part: expected one of "
            f"{', '.join(sorted(LEARNED))}"
        )
    module, _, name = target.partition(":")
    kind = cast(type[LearnedPart], getattr(importlib.import_module(module), name))
    return kind(build(kind.settings, settings, f"{where}: settings", CheckpointError))


def need_part(kind: type[Any], part: Any, num_blocks: int) -> Any:
    """The trained part that a policy is made of.

    Raises:
        PolicyError: The model has none, or one of another method or depth.
    """
    if not isinstance(part, kind):
        raise PolicyError(
            f"this model has no trained part of policy {kind.policy!r}: train one by its recipe, "
            "and load the checkpoint that it writes"
        )
    if part.config.num_blocks != num_blocks:
        raise PolicyError(
            f"policy {kind.policy!r} was trained for {part.config.num_blocks} blocks and the model "
            f"has {num_blocks}: use one trained for this model"
        )
    return part
