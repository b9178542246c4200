"""A checkpoint's model card: README.md, with its facts in a YAML header, as on the hub."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from buddy.errors import CheckpointError
from buddy.files import read_bytes
from buddy.hub.safe_paths import find_inside

CARD: Final = "README.md"
_MAX_BYTES: Final = 2**20
_DEEPEST: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a model card says."""

    text: str
    """Markdown, without the header."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The header, such as `license` and `base_model`."""


def quantised_card(card: Card | None, name: str, quant: str) -> Card:
    """A card that says first what was done to the weights.

    Args:
        card: Of the model with plain weights.
        name: Of that model.
        quant: How they are quantised.
    """
    before = (
        Card(text="", facts={"base_model": name, "license": "unknown"}) if card is None else card
    )
    text = f"""\
> The weights of this folder are those of `{name}` in {quant}, with any adapter folded in, and its
> base model is needed no more. What follows was written of the plain weights, and so were its
> figures.

{before.text}"""
    return Card(text=text, facts=before.facts)


def read_card(folder: Path) -> Card | None:
    """The model card in a folder; None where there is none.

    Raises:
        CheckpointError: It is no file of the folder, too long or no text, or its header no YAML.
    """
    path = find_inside(folder, CARD)
    if path is None:
        return None
    content = read_bytes(path, CheckpointError, most=_MAX_BYTES)
    try:
        return parse_card(content.decode())
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no model card: it is not UTF-8") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_card(content: str) -> Card:
    """Split a model card into header and text.

    Raises:
        CheckpointError: The header is no YAML, or no mapping of what JSON can hold.
    """
    import yaml

    lines = content.split("\n")
    ends = [line.rstrip() for line in lines]
    if ends[0] != "---":
        return Card(text=content)
    try:
        end = ends.index("---", 1)
        facts = _plain_values("\n".join(lines[1:end]))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"the header of the model card is no YAML between two lines of --- "
            f"({' '.join(str(error).split())})"
        ) from error
    if not isinstance(facts, dict):
        raise CheckpointError("the header of the model card has no names and values")
    return Card(text="\n".join(lines[end + 1 :]).strip() + "\n", facts=facts)


def _plain_values(header: str) -> Any:
    """What a header says, as JSON could: a date is a text.

    Raises:
        ValueError: It has a tag, or an alias, by which a few lines could stand for gigabytes; or a
            number that JSON cannot hold; or it is nested too deeply.
        YAMLError: It is no YAML.
    """
    import yaml

    class Plain(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        yaml_implicit_resolvers: ClassVar = {
            first: [known for known in resolvers if not known[0].endswith(":timestamp")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    depth = 0
    for event in yaml.parse(header, Loader=Plain):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:  # yaml's time grows with the square of it
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise ValueError("it has an alias or a tag, and only plain values are read")
    values = yaml.load(header, Loader=Plain)
    json.dumps(values, allow_nan=False)
    return values


def write_card(card: Card) -> str:
    """The reverse of `parse_card`."""
    import yaml

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
        def ignore_aliases(self, data: Any) -> bool:
            return True  # `parse_card` reads none

    header = yaml.dump(card.facts, Dumper=Plain, sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n{card.text}"
