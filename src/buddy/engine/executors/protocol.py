"""What runs decode steps in the place of the general path: the kernel on a CPU, graphs on a GPU."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.plan import DepthPlan
from buddy.engine.state.session import Session

if TYPE_CHECKING:
    from buddy.engine.run import Step


@runtime_checkable
class Run(Protocol):
    """One pass on its way through the blocks, where a decoder has taken it."""

    @property
    def hidden(self) -> Float[Tensor, "batch tokens hidden"]:
        """The residual as it is now."""

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every row runs them."""

    def finish(self, blocks: range, plan: DepthPlan) -> Float[Tensor, "batch tokens vocab"]:
        """Run the last blocks, and the output projection."""

    def executed(self) -> Int[Tensor, " batch"]:
        """Blocks that each row ran, counted as they ran."""


@runtime_checkable
class Decoder(Protocol):
    """Runs decode steps in the place of the general path, on the same session."""

    def takes(self, session: Session, step: "Step") -> bool:
        """Whether this step is for it."""

    def begin(self, session: Session, token_ids: Int[Tensor, "batch tokens"]) -> Run:
        """A pass over new tokens, for which the timeline is extended."""
