"""The trained part of a method: what a checkpoint keeps of one beside adapters and the router."""

from dataclasses import asdict
from typing import Any, ClassVar, cast

from buddy.depth.policy import PolicyResources
from buddy.errors import CheckpointError, PolicyError
from buddy.policies.registry import find_method, methods
from buddy.routing.float32 import Float32Module
from buddy.settings import build


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
    method = find_method(policy)
    if method is None or method.part is None:
        keeping = ", ".join(other.name for other in methods() if other.part is not None)
        raise CheckpointError(
            f"{where}: no method {policy!r} keeps a trained part: expected one of {keeping}"
        )
    kind = cast(type[LearnedPart], method.load("part"))
    return kind(build(kind.settings, settings, f"{where}: settings", CheckpointError))


def need_part(kind: type[Any], resources: PolicyResources) -> Any:
    """The trained part that a policy is made of.

    Raises:
        PolicyError: The model has none, or one of another method or depth.
    """
    part = resources.learned
    if not isinstance(part, kind):
        raise PolicyError(
            f"this model has no trained part of policy {kind.policy!r}: train one by its recipe, "
            "and load the checkpoint that it writes"
        )
    check_fits(
        kind.policy,
        "for {} blocks and the model has {}",
        part.config.num_blocks,
        resources.num_blocks,
    )
    return part


def check_fits(policy: str, phrase: str, trained: int, model: int) -> None:
    """Refuse a trained part that has another size than the model.

    Args:
        policy: Whose part it is.
        phrase: What it was trained for, with a place for either size.
        trained: The part's size.
        model: The model's.

    Raises:
        PolicyError: They differ.
    """
    if trained != model:
        raise PolicyError(
            f"policy {policy!r} was trained {phrase.format(trained, model)}: use one trained for "
            "this model"
        )
