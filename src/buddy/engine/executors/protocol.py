"""Who runs blocks: the general path anywhere, compiled code on a CPU, CUDA graphs on a GPU."""

from typing import Final, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.plan import DepthPlan
from buddy.depth.policy import Observation
from buddy.engine.feed import Feed
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.session import Session

GENERAL: Final = "general"
"""What the general path is called, which is no executor of its own."""


@runtime_checkable
class Run(Protocol):
    """One pass on its way through the blocks."""

    lanes: Lanes

    @property
    def hidden(self) -> Float[Tensor, "lanes hidden"]:
        """The residual as it is now."""

    def observe(self, context_layer: int) -> Observation:
        """The new tokens, and what the 1-based context layer cached of them; 0 = no layer."""

    def set_residual(self, hidden: Float[Tensor, "lanes hidden"]) -> None:
        """Go on with another residual than the blocks so far have left."""

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every lane runs them."""

    def finish(
        self, blocks: range, plan: DepthPlan | None, num_logits: int | None = None
    ) -> Float[Tensor, "lanes num_logits"] | None:
        """Run the last blocks; logits where they come with them.

        Args:
            blocks: The last.
            plan: Of each lane; None = every lane runs them.
            num_logits: How many token ids need logits, from the first on; None = all.
        """

    def executed(self) -> Int[Tensor, " lanes"]:
        """Blocks that each lane ran, counted as they ran; on the host."""


@runtime_checkable
class Executor(Protocol):
    """Runs passes in the place of the general path, on the same session."""

    @property
    def name(self) -> str:
        """What traces and records call it."""

    @property
    def makes_some_logits(self) -> bool:
        """Whether logits of some token ids cost less than those of all."""

    @property
    def steady_lanes(self) -> int:
        """New tokens of a pass up to which no lane's numbers depend on the others; 0 = they do.

        But for those of its own sequence: see `serving/rows/passes.py`, `cut`.
        """

    def takes(self, lanes: Lanes) -> bool:
        """Whether this pass is for it; it has no gradients."""

    def begin(self, session: Session, lanes: Lanes, feed: Feed) -> Run:
        """A pass over new tokens."""

    def logits(
        self, hidden: Float[Tensor, "*shape hidden"]
    ) -> Float[Tensor, "*shape vocab"] | None:
        """Logits of residuals of its own passes; None = the general path makes them."""
