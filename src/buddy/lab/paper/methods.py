"""Methods that are compared: a label, and a policy, a model, or a policy on a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from buddy.errors import PolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedMethod:
    """One row of a table."""

    label: str
    """What tables and figures call it."""
    policy: str | None = None
    """Policy as `--policy` takes it; the model's own where None."""
    model: str | None = None
    """Model as `--model` takes it; the run's own where None."""


def read_method(text: str) -> ComparedMethod:
    """A method from `LABEL=POLICY`, `LABEL=MODEL` or `LABEL=POLICY@MODEL`.

    Raises:
        PolicyError: It has no label, or nothing after it; or a policy is named that is none.
    """
    from buddy.policies.registry import check_policy, policy_names

    label, equals, rest = text.partition("=")
    if not (equals and label.strip() and rest.strip()):
        raise PolicyError(
            "a method is LABEL=POLICY, LABEL=MODEL or LABEL=POLICY@MODEL, as in "
            f"SLEB=static:sleb.json, got {text!r}"
        )
    first, at, model = rest.partition("@")
    if first.partition(":")[0] not in policy_names():
        if at and model:
            raise PolicyError(
                f"no policy {first!r} in {text!r}: expected one of {', '.join(policy_names())}"
            )
        return ComparedMethod(label=label.strip(), model=rest)
    check_policy(first)
    return ComparedMethod(label=label.strip(), policy=first, model=model or None)


def check_labels(methods: Sequence[ComparedMethod]) -> None:
    """Refuse two methods of one label.

    Raises:
        PolicyError: A label stands for two.
    """
    labels = [method.label for method in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise PolicyError(f"two methods are called {label!r}: give each a label of its own")


def by_model(methods: Sequence[ComparedMethod], own: str) -> dict[str, list[ComparedMethod]]:
    """Methods by the model that they run on, in the order of their first."""
    groups: dict[str, list[ComparedMethod]] = {}
    for method in methods:
        groups.setdefault(method.model or own, []).append(method)
    return groups
