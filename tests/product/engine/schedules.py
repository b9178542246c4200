"""Random schedules: sequences of unequal length that join, are fed some tokens each, and leave."""

from dataclasses import dataclass, field

import torch

from buddy.depth.plan import DepthPlan
from buddy.engine.feed import Feed
from buddy.engine.naive import naive_hidden
from buddy.engine.run import run_step
from buddy.engine.steer import Steering
from buddy.engine.step import Step
from tests.tiny import VOCAB


@dataclass(frozen=True)
class FixedPlanSteering(Steering):
    """A plan that is known beforehand, of the lanes of a pass."""

    known: DepthPlan

    def plan(self, blocks, run):
        return self.known


@dataclass
class Fed:
    """What one sequence was fed, and which blocks each of its tokens ran."""

    tokens: list = field(default_factory=list)
    runs: list = field(default_factory=list)


class Schedule:
    """One session under random plans, every lane its own; compared with the reference.

    Args:
        buddy: The model.
        kv_policy: What a skipped block leaves.
        seed: Of everything that is drawn.
        executors: The step draws one of them; None is the general path.
    """

    def __init__(self, buddy, kv_policy, seed, executors=(None,)):
        self.buddy, self.kv_policy, self.executors = buddy, kv_policy, executors
        self.draw = torch.Generator().manual_seed(seed)
        self.session = buddy.new_session(1, 2, kv_policy)
        self.fed = {}

    def number(self, below):
        return int(torch.randint(0, below, (1,), generator=self.draw))

    def step(self, most_tokens=4):
        """Some join, some leave, some of the others are fed; the logits of each lane."""
        if not self.fed or self.number(3) == 0:
            self.fed[self.session.join()] = Fed()
        if len(self.fed) > 1 and self.number(4) == 0:
            gone = list(self.fed)[self.number(len(self.fed))]
            self.session.leave(gone)
            del self.fed[gone]
        numbers = [n for n in self.fed if self.number(4) or not self.fed[n].tokens]
        numbers = numbers or [next(iter(self.fed))]
        counts = [1 + self.number(most_tokens) for _ in numbers]
        lanes = sum(counts)
        ids = torch.randint(2, VOCAB, (lanes,), generator=self.draw)
        share = 0.3 + 0.6 * torch.rand(1, generator=self.draw)
        plan = DepthPlan(torch.rand(lanes, self.buddy.num_blocks, generator=self.draw) < share)
        executor = self.executors[self.number(len(self.executors))]
        out = self.feed(numbers, counts, ids, plan, executor)
        self.note(numbers, counts, ids, plan)
        return numbers, counts, out

    def feed(self, numbers, counts, ids, plan, executor=None):
        return run_step(
            self.buddy.backbone,
            self.buddy.policy,
            self.session,
            Step(
                sequence_ids=numbers,
                feed=Feed(token_ids=ids, counts=tuple(counts)),
                steering=FixedPlanSteering(plan),
            ),
            executor=executor,
        )

    def note(self, numbers, counts, ids, plan):
        parts = zip(ids.split(counts), plan.mask.split(counts), strict=True)
        for number, (tokens, runs) in zip(numbers, parts, strict=True):
            self.fed[number].tokens += tokens.tolist()
            self.fed[number].runs += runs.tolist()

    def expected(self, fed):
        """The residual of every token that a sequence was fed, by the reference."""
        return naive_hidden(
            self.buddy.backbone,
            torch.tensor(fed.tokens),
            torch.tensor(fed.runs),
            self.kv_policy,
        )


def last_of(numbers, counts, out):
    """The residuals of each sequence's new tokens."""
    return dict(zip(numbers, out.hidden.split(counts), strict=True))
