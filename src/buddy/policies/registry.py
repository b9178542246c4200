"""Policies and methods by name: the product's own, and those that packages register.

A package registers under one of two entry-point groups:

    buddy.policies    a policy, as `package.module:Class`
    buddy.methods     a `Method`, as `package.module:METHOD`; or a package whose folders are
                      methods, each with a `METHOD` in its `method.py`
"""

import importlib
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal

from buddy.depth.policy import Policy, PolicyResources, check_is_policy
from buddy.errors import PolicyError, shown
from buddy.records import read_record

POLICIES: Final = {
    "full": "buddy.policies.full:FullPolicy",
    "random": "buddy.policies.random:RandomPolicy",
    "routed": "buddy.policies.routed:RoutedPolicy",
    "searched": "buddy.policies.searched:SearchedPolicy",
    "static": "buddy.policies.static:StaticPolicy",
}
"""The product's own policies: name -> `module:class`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method of choosing blocks: where its parts are, each imported when it is asked for.

    A reference is `module:name`; one that begins with a dot is relative to the method's package.
    """

    policy: str
    """Its policy, a `DepthPolicy` or an `OnlinePolicy`."""
    part: str | None = None
    """What a checkpoint keeps of it, a `LearnedPart`; None where nothing is."""
    recipe: str | None = None
    """A dataclass, the recipe of its training; it is told the method's name where it has a field
    `method`. None where nothing is trained."""
    train: str | None = None
    """Takes the recipe and the run's folder, with `resume` and `listener` by name, and returns the
    checkpoint's folder."""
    label: str | None = None
    """What tables and figures call it; its name where None."""
    keeps_budget: bool = True
    """False where it decides while it runs, and a threshold sets its mean depth."""
    name: str = ""
    """Given by the registry: that of the entry point, or of the folder with - for _."""
    package: str = ""
    """Given by the registry: what references with a dot are relative to."""

    def load(self, what: Literal["policy", "part", "recipe", "train"]) -> Any:
        """Import one of the four; None where the method has none."""
        reference = getattr(self, what)
        return None if reference is None else load_reference(reference, self.package)


def load_reference(reference: str, package: str = "") -> Any:
    """Import what `module:name` refers to.

    Args:
        reference: A module that begins with a dot is relative.
        package: What it is relative to.
    """
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module, package or None), name)


def find_method(name: str) -> Method | None:
    """A method by its name; None where none is registered under it.

    Raises:
        PolicyError: What is registered cannot be imported, or is no method.
    """
    place = _method_places().get(name)
    return None if place is None else _load_method(name, place)


def methods() -> list[Method]:
    """Every method that is registered and can be imported, by name."""
    loaded = []
    for name, place in sorted(_method_places().items()):
        with suppress(PolicyError):
            loaded.append(_load_method(name, place))
    return loaded


def policy_names() -> list[str]:
    """Every policy that can be named: built in, of a method, or registered on its own."""
    return sorted({*POLICIES, *_method_places(), *entry_points(group="buddy.policies").names})


def split_label(text: str) -> tuple[str | None, str]:
    """Split `SPEC` or `LABEL=SPEC` into the label, None where there is none, and the spec.

    What begins with a policy's name and a colon is a spec: a path may have an = in it.
    """
    label, equals, spec = text.partition("=")
    if not equals or text.partition(":")[0] in policy_names():
        return None, text
    return label, spec


def build_policy(spec: str, resources: PolicyResources) -> Policy:
    """Make a policy from what a user wrote.

    Args:
        spec: `NAME` or `NAME:ARGUMENT`, as in `random:7` or `static:12,11,20`.
        resources: What the model offers.

    Raises:
        PolicyError: No such policy, or it cannot serve this model.
    """
    kind, argument = _find_policy(spec)
    return check_is_policy(kind.from_spec(argument, resources))


def check_policy(spec: str) -> None:
    """Refuse what can serve no model at all.

    Raises:
        PolicyError: No such policy.
        ResultError: It is to be read from a record that cannot be read.
    """
    _, argument = _find_policy(spec)
    if argument.endswith(".json"):
        read_record(Path(argument))


def _find_policy(spec: str) -> tuple[Any, str]:
    """The class that a spec names, and the argument for it."""
    name, _, argument = spec.partition(":")
    if name in POLICIES:
        return load_reference(POLICIES[name]), argument
    method = find_method(name)
    if method is not None:
        return method.load("policy"), argument
    for entry in entry_points(group="buddy.policies", name=name):
        return _load_registered(entry.value, "buddy.policies"), argument
    hint = ""
    if not entry_points(group="buddy.methods"):
        hint = (
            " (no methods are registered: where buddy-llm was installed long ago, install it again)"
        )
    raise PolicyError(f"no policy {name!r}: expected one of {', '.join(policy_names())}{hint}")


def _method_places() -> dict[str, str]:
    """Where each registered method is, as `module:name`; nobody takes a name of ours."""
    places: dict[str, str] = {}
    entries = entry_points(group="buddy.methods")
    for entry in sorted(entries, key=lambda entry: entry.module == "buddy.methods"):
        folders = [] if entry.attr else _method_folders(entry.module)
        for folder in folders:
            places[folder.replace("_", "-")] = f"{entry.module}.{folder}.method:METHOD"
        if not folders:  # of a package that cannot be imported, who asks for its name is told
            places[entry.name] = entry.value
    return places


def _method_folders(package: str) -> list[str]:
    with suppress(PolicyError):
        roots = _load_registered(package, "buddy.methods").__path__
        return [path.parent.name for root in roots for path in Path(root).glob("*/method.py")]
    return []


def _load_method(name: str, place: str) -> Method:
    method = _load_registered(place, "buddy.methods")
    if not isinstance(method, Method):
        raise PolicyError(
            f"entry point {name!r} of the group buddy.methods is a {type(method).__name__}: "
            "expected a Method of buddy.policies.registry, or a package of method folders"
        )
    package = place.partition(":")[0].rpartition(".")[0]
    return replace(method, name=name, label=method.label or name, package=package)


def _load_registered(place: str, group: str) -> Any:
    """Import a module, or what `module:name` refers to, for the entry points of a group."""
    module, colon, _ = place.partition(":")
    try:
        return load_reference(place) if colon else importlib.import_module(module)
    except Exception as error:  # whatever the module does
        raise PolicyError(
            f"{shown(place)}, registered under {group}, cannot be imported ({error}): install its "
            "package again, or remove it"
        ) from error
