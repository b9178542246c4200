"""The model card of a checkpoint with sets and a classifier."""

from collections.abc import Sequence

from buddy.checkpoint.card import Card
from buddy.data.examples import Source
from buddy.training.card import TO_STATE, base_facts, list_sources


def with_pudding(
    card: Card | None,
    base: str,
    sources: Sequence[Source],
    sets: Sequence[str],
    depths: Sequence[int],
) -> Card:
    """A card with the sets and the classifier of PuDDing.

    Args:
        card: Of the model that they were made for; None where it has none.
        base: That model, as the recipe names it.
        sources: Of the training rows.
        sets: Names of the sets.
        depths: Blocks that ran when the classifier's targets were measured.
    """
    before = card or Card(text="# A Buddy checkpoint\n", facts=base_facts(base))
    text = f"""\
{before.text.rstrip()}

## PuDDing

A classifier chooses one of {len(sets)} sets of blocks for each prompt ({", ".join(sets)}). It
reads the mean of the first block's values, and was trained on the answers' log-likelihoods at
{", ".join(map(str, depths))} blocks, of rows from:

{list_sources(sources)}
"""
    return Card(text=f"{text}\n{TO_STATE}" if card is None else text, facts=before.facts)
