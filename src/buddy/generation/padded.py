"""A batch as transformers' callers lay it out: rows and columns, with pads on either side."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.plan import DepthPlan
from buddy.engine.feed import Feed
from buddy.engine.state.session import Session
from buddy.engine.step import StepOutput
from buddy.errors import PromptError

_ID_TYPES: Final = (torch.int64, torch.int32)


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
            token_ids: New tokens, [batch, tokens]; they and the masks may be on any device.
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
        device = backbone.device
        token_ids = token_ids.to(device)
        attention_mask = None if attention_mask is None else attention_mask.to(device)
        prompt_mask = None if prompt_mask is None else prompt_mask.to(device)
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


def left_padded(
    token_ids: Int[Tensor, "batch tokens"], mask: Int[Tensor, "batch tokens"], start: int = 0
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
    """Turn each row, from a column on, until its last column is a real token.

    Args:
        token_ids: Rows with pads on either side.
        mask: 0 = pad; each row has at least one real token from that column on.
        start: The column: those before are a session's, and stay where they are.
    """
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    last = (mask.bool() * column).argmax(1)  # [B], the last real column
    turned = start + (column - start + last[:, None] - start + 1) % (len(column) - start)
    turned = torch.where(column < start, column, turned)
    return token_ids.gather(1, turned), mask.gather(1, turned)


def check_prompts(
    token_ids: Int[Tensor, "batch tokens"],
    valid: Bool[Tensor, "batch tokens"],
    backbone: Backbone,
) -> None:
    """Refuse a batch with an empty row, or with one that the model cannot read or hold.

    Raises:
        PromptError: Such a row.
    """
    lengths = valid.sum(1).tolist()
    if not lengths or min(lengths) == 0:
        raise PromptError("a prompt has no tokens: expected at least one")
    if max(lengths) > backbone.context:
        raise PromptError(
            f"a prompt has {max(lengths)} tokens, but the model's context holds "
            f"{backbone.context}: shorten it"
        )
    check_ids(token_ids[valid], backbone)


def check_ids(token_ids: Int[Tensor, " tokens"], backbone: Backbone) -> None:
    """Refuse ids that are no tokens of the model.

    Raises:
        PromptError: There is one.
    """
    low, high = torch.stack(token_ids.aminmax()).tolist()
    vocab = backbone.embedding.num_embeddings
    if low < 0 or high >= vocab:
        raise PromptError(
            f"token id {low if low < 0 else high} is not one of the model's {vocab}: use the "
            "model's own tokenizer, and an attention_mask that is 0 for pads"
        )


def check_shapes(
    token_ids: Tensor,
    *,
    valid: Tensor,
    prompt_mask: Tensor | None,
    session: Any,
    backbone: Backbone,
) -> None:
    """Refuse token ids, masks and sessions that do not fit each other, or the model.

    Raises:
        PromptError: One does not fit, or there are no tokens.
    """
    if token_ids.ndim != 2 or token_ids.numel() == 0 or token_ids.dtype not in _ID_TYPES:
        raise PromptError(
            "there are no new tokens: expected whole numbers of shape [batch, tokens], got "
            f"{str(token_ids.dtype).removeprefix('torch.')} of shape {list(token_ids.shape)}"
        )
    for name, mask in (("attention_mask", valid), ("prompt_mask", prompt_mask)):
        if mask is not None and mask.shape != token_ids.shape:
            raise PromptError(
                f"{name} has shape {list(mask.shape)} over the new tokens, "
                f"expected {list(token_ids.shape)}"
            )
    if session is None:
        return
    if not isinstance(session, Session):
        raise PromptError(
            f"cache is a {type(session).__name__}, and Buddy keeps what skipped blocks "
            "leave in a session of its own: pass the cache that this model returned"
        )
    if not session.is_of(backbone):
        raise PromptError(
            "cache is a session of another model, whose keys and values mean nothing here: pass "
            "the cache that this model returned, or leave it out"
        )
    if session.batch != len(token_ids):
        raise PromptError(
            f"the session holds {session.batch} rows and {len(token_ids)} came: "
            "feed all rows of a batch at every step"
        )


def check_columns(session: Session | None, mask: Tensor | None, columns: int) -> None:
    """Refuse a mask that takes other columns for pads than those that the session was fed as pads.

    Args:
        session: What was fed.
        mask: 0 = pad. One over other columns than all says nothing of those before.
        columns: In all, the new ones too.

    Raises:
        PromptError: A row has more or fewer tokens by the mask than in the session.
    """
    seen = 0 if session is None else session.get_seq_length()
    if session is None or not seen or mask is None or mask.shape[-1] != columns:
        return
    real = mask[:, :seen].bool().sum(1).tolist()
    for row, (count, fed) in enumerate(zip(real, session.sequences.values(), strict=False)):
        if count != fed.length:
            raise PromptError(
                f"attention_mask says that row {row} has {count} tokens in the {seen} columns "
                f"that were fed, and its session holds {fed.length}: expected 1 for them, and 0 "
                "for pads, those after the row's end too"
            )


def check_new_tokens(session: Session | None, mask: Tensor) -> int:
    """Columns that the session was fed; refuses a row that has nothing but pads after them.

    Raises:
        PromptError: A row has no new token.
    """
    seen = 0 if session is None else session.get_seq_length()
    if not seen:  # the whole row is a prompt, and was looked at as one
        return 0
    for row, has_new in enumerate(mask[:, seen:].any(1).tolist()):
        if not has_new:
            raise PromptError(
                f"row {row} has no new token in the {mask.shape[1] - seen} columns after the "
                f"{seen} that its session was fed: each row goes on from a token of its own; give "
                "it one, or begin a session without the row"
            )
    return seen
