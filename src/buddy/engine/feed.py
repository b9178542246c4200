"""A feed: the new tokens of a pass, those of a sequence side by side."""

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from buddy.errors import PromptError


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """New tokens, those of a sequence side by side.

    Attributes:
        token_ids: By lane.
        counts: New tokens of each sequence, at least one.
        router_sees: Lanes that the route may see; None = all.
        prompts: Of each sequence, whether its tokens are of its prompt; None = where it has had
            no step yet.
    """

    token_ids: Int[Tensor, " lanes"]
    counts: tuple[int, ...]
    router_sees: Bool[Tensor, " lanes"] | None = None
    prompts: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.counts, default=0) < 1 or sum(self.counts) != self.token_ids.shape[0]:
            raise PromptError(
                f"a feed has {len(self.token_ids)} tokens for sequences of {list(self.counts)}: "
                "expected at least one of each, and as many as the counts say in all"
            )

    @classmethod
    def of_batch(
        cls,
        token_ids: Int[Tensor, "batch tokens"],
        valid: Bool[Tensor, "batch tokens"] | None = None,
        router_sees: Bool[Tensor, "batch tokens"] | None = None,
    ) -> "Feed":
        """The tokens of a padded batch; a row of pads alone is left out.

        Args:
            token_ids: Pads on either side, or none.
            valid: False for pads; None = there are none.
            router_sees: Tokens that the route may see; None = all.
        """
        batch, tokens = token_ids.shape
        if valid is None or bool(valid.all()):
            sees = None if router_sees is None else router_sees.flatten()
            return cls(token_ids=token_ids.flatten(), counts=(tokens,) * batch, router_sees=sees)
        return cls(
            token_ids=token_ids[valid],
            counts=tuple(count for count in valid.sum(1).tolist() if count),
            router_sees=None if router_sees is None else router_sees[valid],
        )
