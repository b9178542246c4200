"""A batch as transformers' callers lay it out: rows and columns, with pads on either side."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.plan import DepthPlan
from buddy.engine.feed import Feed
from buddy.engine.step import StepOutput
from buddy.errors import PromptError
from buddy.generation.generate import check_columns, check_ids, check_prompts, check_shapes


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """New tokens of a batch.

    Attributes:
        token_ids: Pads included.
        valid: False for pads.
        router_sees: Tokens that the route may see; None = all that are no pads.
        rows: Those that have a new token.
        feed: The new tokens, pads left out.
    """

    token_ids: Int[Tensor, "batch tokens"]
    valid: Bool[Tensor, "batch tokens"]
    router_sees: Bool[Tensor, "batch tokens"] | None
    rows: list[int]
    feed: Feed

    @classmethod
    def read(
        cls,
        token_ids: Tensor | None,
        attention_mask: Tensor | None,
        prompt_mask: Tensor | None,
        session: Any,
        backbone: Backbone,
    ) -> "PaddedBatch":
        """Check what a caller feeds.

        Args:
            token_ids: New tokens, [batch, tokens].
            attention_mask: 0 = pad, over the new columns or all so far; None = no pads.
            prompt_mask: Tokens that the route may see; None = all.
            session: What was fed before; anything else than a `Session` or None is refused.
            backbone: The model's.

        Raises:
            PromptError: No tokens, more than the context holds, ids that the model has not, or
                masks that fit neither them nor the session.
        """
        if token_ids is None:
            raise PromptError("there are no new tokens: expected input_ids")
        valid = _new_columns(token_ids, attention_mask)
        check_shapes(
            token_ids, valid=valid, prompt_mask=prompt_mask, session=session, backbone=backbone
        )
        if session is not None:
            columns = session.get_seq_length() + token_ids.shape[1]
            check_columns(session, attention_mask, columns)
        if session is None or session.steps == 0:
            check_prompts(token_ids, valid, backbone)
        rows = valid.any(1).nonzero()[:, 0].tolist()
        if not rows:
            raise PromptError("there are no new tokens: attention_mask calls every one a pad")
        sees = None if prompt_mask is None else valid & prompt_mask.bool()
        feed = Feed.of_batch(token_ids, valid, sees)
        if session is not None and session.steps:
            check_ids(feed.token_ids, backbone)
        return cls(token_ids, valid, sees, rows, feed)

    @property
    def num_rows(self) -> int:
        """Rows, those without a new token too."""
        return self.token_ids.shape[0]

    @property
    def num_columns(self) -> int:
        """Columns that are new."""
        return self.token_ids.shape[1]

    @property
    def prompts(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a budget is chosen from: token ids, which are no pads, and what the route sees."""
        seen = self.valid if self.router_sees is None else self.router_sees
        return self.token_ids, self.valid, seen

    def in_columns(self, by_lane: Float[Tensor, "lanes width"]) -> Float[Tensor, "..."]:
        """What a pass made of each token, in the caller's columns; that of pads means nothing."""
        if len(by_lane) == self.valid.numel():
            return by_lane.view(*self.valid.shape, -1)
        columns = by_lane.new_zeros(*self.valid.shape, by_lane.shape[1])
        return columns.index_put((self.valid,), by_lane)

    def last_plan(self, out: StepOutput) -> DepthPlan:
        """What the last new token of each row ran; nothing, where a row was fed pads alone."""
        last = out.last_plan
        if len(self.rows) == self.num_rows:
            return last
        host = np.zeros((self.num_rows, last.host.shape[1]), np.bool_)
        host[self.rows] = last.host
        return DepthPlan.of_lanes(host, out.plan.device)

    def executed(self, out: StepOutput) -> Int[Tensor, " batch"]:
        """How many blocks the last new token of each row ran."""
        counts = torch.zeros(self.num_rows, dtype=torch.long)
        counts[self.rows] = out.executed[torch.from_numpy(out.lanes.last)]
        return counts


def _new_columns(token_ids: Tensor, mask: Tensor | None) -> Bool[Tensor, "..."]:
    """Which new tokens are no pads."""
    if mask is None:
        return torch.ones_like(token_ids, dtype=torch.bool)
    return mask[..., max(0, mask.shape[-1] - token_ids.shape[-1]) :].bool()
