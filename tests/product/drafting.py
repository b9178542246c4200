"""What tests of drafts by few blocks share, in `generate` and in a server."""

import torch

from buddy.generation import depth_drafts
from buddy.generation.payoff import DraftCost


def always_draft(monkeypatch):
    """Drafts go on whatever their chance and their cost: a tiny model is never sure nor slow."""
    monkeypatch.setattr(depth_drafts, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(depth_drafts, "DRAFTED_WORDS", 1.0)
    monkeypatch.setattr(depth_drafts, "places_that_pay", lambda chances, *_: range(len(chances)))
    monkeypatch.setattr(DraftCost, "plain_s", lambda self, kind: 1.0)


@torch.no_grad()
def say_little(buddy, share):
    """Let a model's later blocks say little, so that few blocks are right now and then."""
    for block in buddy.backbone.blocks[1:]:
        for part in (*block.self_attn.o_proj.parameters(), block.mlp.down_proj.weight):
            part.mul_(share)
    return buddy


class Clock:
    """Passes take what they are said to take."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def times(self, monkeypatch, module, seconds):
        """Let each step that a module runs take so long."""
        run = module.run_step

        def step(*args, **more):
            self.now += seconds
            return run(*args, **more)

        monkeypatch.setattr(module, "run_step", step)
