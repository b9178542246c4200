"""Decoding of given tokens, step by step."""

import torch


@torch.no_grad()
def decode(buddy, ids, mask, continuation, **options):
    """Logits and plans of each fed token, and the session."""
    out = buddy(ids, mask, **options)
    logits, plans = [], []
    for step in range(continuation.shape[1]):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        out = buddy(continuation[:, step : step + 1], mask, cache=out.cache, **options)
        logits.append(out.logits[:, 0])
        plans.append(out.plan.mask)
        assert out.executed_blocks.tolist() == out.plan.depth.tolist()
    return torch.stack(logits, 1), torch.stack(plans, 1), out.cache
