"""The executable specification: no cache, no batch, no gather; every step computed from scratch.

Slow on purpose. Tests compare the engine with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.backbone.depth_scales import depths_known
from buddy.depth.policy import DepthPolicy, Observation
from buddy.depth.select import select_blocks
from buddy.engine.state.cache import KVPolicy
from buddy.engine.state.sequence import Reroute


@dataclass
class _Tap:
    """Sees the keys and values of one block, and zeroes those that `zero` would not have."""

    zeroed: Bool[Tensor, " tokens"] | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.zeroed is not None:
            keys = keys.masked_fill(self.zeroed[None, None, :, None], 0)
            values = values.masked_fill(self.zeroed[None, None, :, None], 0)
        self.keys, self.values = keys, values
        return keys, values


def naive_hidden(
    backbone: Backbone,
    token_ids: Int[Tensor, " tokens"],
    runs: Bool[Tensor, "tokens blocks"],
    kv_policy: KVPolicy,
) -> Float[Tensor, "tokens hidden"]:
    """The residual after the last block, when each token runs its own set of blocks.

    A block is computed for every token, and its result kept only where the token runs it. Keys
    and values come from the residual that enters the block, run or not: that is `project`, and
    `lazy`. `mask` hides the tokens that skipped the block; `zero` zeroes theirs.
    """
    tokens = len(token_ids)
    positions = torch.arange(tokens, device=token_ids.device)[None]
    hidden = backbone.embed(token_ids[None])
    rotary = backbone.rotary(hidden, positions)
    distance = positions[0][:, None] - positions[0]
    scales = backbone.depth_scales
    shares = None if scales is None else scales.shares(runs.sum(1).cpu().numpy())[None]
    for block in range(backbone.num_blocks):
        run = runs[:, block]
        seen = distance >= 0
        window = backbone.windows[block]
        if window is not None:
            seen = seen & (distance < window)
        if kv_policy == "mask":
            seen = (seen & run) | torch.eye(tokens, dtype=torch.bool, device=run.device)
        tap = _Tap(~run if kv_policy == "zero" else None)
        with depths_known(shares):
            out = backbone.run_block(block, hidden, seen[None, None], positions, rotary, tap)
        hidden = torch.where(run[None, :, None], out, hidden)
    return hidden[0]


def naive_context(
    backbone: Backbone, token_ids: Int[Tensor, " tokens"], layer: int
) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values [1, tokens, width] of the 1-based context layer; None for layer 0."""
    if layer == 0:
        return None, None
    positions = torch.arange(len(token_ids), device=token_ids.device)[None]
    hidden = backbone.embed(token_ids[None])
    rotary = backbone.rotary(hidden, positions)
    tap = _Tap()
    for block in range(layer):
        window = backbone.windows[block]
        distance = positions[0][:, None] - positions[0]
        seen = (distance >= 0) & (distance < (window or len(token_ids)))
        hidden = backbone.run_block(block, hidden, seen[None, None], positions, rotary, tap)
    assert tap.keys is not None
    assert tap.values is not None
    return tap.keys.transpose(1, 2).flatten(2), tap.values.transpose(1, 2).flatten(2)


def naive_decode(
    backbone: Backbone,
    policy: DepthPolicy,
    token_ids: Int[Tensor, " tokens"],
    prompt_tokens: int,
    *,
    blocks: int,
    kv_policy: KVPolicy,
    reroute: Reroute = "step",
    prompt_blocks: int | None = None,
) -> tuple[Float[Tensor, "steps vocab"], Bool[Tensor, "steps blocks"]]:
    """Prefill `prompt_tokens`, then feed the rest one by one.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        token_ids: Prompt and continuation.
        prompt_tokens: Length of the prompt.
        blocks: Budget of every token.
        kv_policy: What a skipped block leaves behind.
        reroute: When blocks are chosen again.
        prompt_blocks: Budget of the prompt's tokens, if it is another.

    Returns:
        For prefill and each decode step, the logits after its last token, and its plan.
    """
    plans: list[Tensor] = []
    logits = []
    for step, stop in enumerate(range(prompt_tokens, len(token_ids) + 1)):
        due = reroute == "step" or (reroute != "prefill" and step % reroute == 0)
        is_other = prompt_blocks not in (None, blocks) and step <= 1
        if step == 0 or due or is_other:
            seen = token_ids[:stop]
            keys, values = naive_context(backbone, seen, policy.context_layer)
            router_sees = torch.ones_like(seen, dtype=torch.bool)[None]
            route = policy.observe(None, Observation(seen[None], router_sees, keys, values))
            depth = blocks if prompt_blocks is None or step > 0 else prompt_blocks
            budget = torch.tensor([depth], device=seen.device)
            scores = policy.scores(route, budget)
            plan = select_blocks(scores, budget, pinned=policy.pinned).mask[0]
        plans.append(plan)
        repeats = torch.tensor([prompt_tokens] + [1] * step, device=plan.device)
        runs = torch.stack(plans).repeat_interleave(repeats, dim=0)  # [T, L]
        hidden = naive_hidden(backbone, token_ids[:stop], runs, kv_policy)
        logits.append(backbone.logits(hidden[-1]))
    return torch.stack(logits), torch.stack(plans)
