"""An engine of discrete events: it takes the time that a cost model says, and obeys a `Control`."""

import math
from dataclasses import dataclass, field
from random import Random

from buddy.errors import BudgetError
from buddy.serving.client import Overloaded
from buddy.serving.control.cost import CostModel, fit
from buddy.serving.control.protocol import QueueView, RowView, StepReport, StepShape
from buddy.serving.request import GenerationRequest, Usage
from tests.budgets import default

L = 30
LEAST = 9


def true_seconds(shape):
    """What a step takes on a machine that is much like two cores and a model of 30 blocks."""
    lanes = shape.row_blocks / shape.union if shape.union else 0.0
    return (
        6e-3
        + 0.3e-3 * shape.rows
        + shape.union * (0.45e-3 + 0.03e-3 * max(lanes - 1, 0))
        + 0.12e-6 * shape.block_context
        + (2e-3 + 22e-6 * shape.prompt_blocks if shape.prompt_lanes else 0.0)
    )


def true_cost():
    """A cost model that knows the machine."""
    shapes = [
        StepShape.of_rows([depth] * rows, [context] * rows, prompt_lanes=p, prompt_depth=depth)
        for rows in (0, 1, 2, 4, 8, 16, 32)
        for depth in (3, 9, 15, 22, 30)
        for context in (16, 400)
        for p in (0, 16, 128, 512)
        if rows or p
    ]
    made = fit(shapes, [true_seconds(row) for row in shapes])
    assert isinstance(made, CostModel)
    return made


@dataclass
class Request:
    at_s: float
    prompt: int
    tokens: int
    budget: object
    number: int = -1
    wanted: int = L
    depth: int = L
    steps: int = 0
    fed: int = 0
    made: int = 0
    prompt_depth: int = 0
    first_s: float | None = None
    last_s: float | None = None
    gaps: list = field(default_factory=list)
    blocks: int = 0
    refused: str | None = None
    retry_s: int = 0
    done: bool = False

    @property
    def ttft_s(self):
        return self.first_s - self.at_s

    @property
    def itl_s(self):
        return sum(self.gaps) / max(len(self.gaps), 1)


class Engine:
    """Rows, a queue and a clock.

    Args:
        most_rows: That run at a time.
        noise: Standard deviation of the logarithm of a step's time.
        slower: By time, how many times as long steps take as the cost model knows.
    """

    def __init__(self, *, most_rows=32, noise=0.05, seed=0, slower=lambda now: 1.0):
        self.now, self.most_rows, self.noise, self.slower = 0.0, most_rows, noise, slower
        self.rng = Random(seed)
        self.waiting, self.rows = [], []
        self.depths = []  # (time, cap or depth, rows) of each pass
        self.orders = []

    def queue(self):
        return QueueView(
            size=len(self.waiting),
            prompt_tokens=sum(row.prompt for row in self.waiting),
            oldest_s=self.now - self.waiting[0].at_s if self.waiting else 0.0,
            running=len(self.rows),
            prompt_tokens_running=sum(row.prompt - row.fed for row in self.rows),
        )

    def submit(self, control, row):
        request = GenerationRequest(
            prompt=(5,) * row.prompt, max_tokens=row.tokens, budget=row.budget
        )
        try:
            control.admit(request, self.queue())
        except (Overloaded, BudgetError) as error:
            row.refused, row.retry_s = str(error), getattr(error, "retry_after_s", 0)
        else:
            self.waiting.append(row)

    def run(self, control, requests, until_s=math.inf):
        """All of the requests, or as many as come to pass."""
        todo = sorted(requests, key=lambda row: row.at_s)
        for number, row in enumerate(todo):
            row.number = number
            row.wanted = row.depth = row.budget.most
        admits = True
        while self.now < until_s and (todo or self.waiting or self.rows):
            if not self.waiting and not self.rows:
                self.now = max(self.now, todo[0].at_s)
            while todo and todo[0].at_s <= self.now:
                self.submit(control, todo.pop(0))
            while self.waiting and len(self.rows) < self.most_rows and (admits or not self.rows):
                self.rows.append(self.waiting.pop(0))
            if self.rows:
                admits = self._pass(control)
        return requests

    def _pass(self, control):
        views = [
            RowView(
                number=row.number,
                budget=row.budget,
                wanted=row.wanted,
                depth=row.depth,
                steps=row.steps,
                context=row.fed + row.made,
                is_elastic=not row.budget.is_contract,
                prompt_left=row.prompt - row.fed,
            )
            for row in self.rows
        ]
        orders = control.decide(views, self.queue())
        self.orders.append((views, orders))
        for row in self.rows:
            wanted = orders.depths.get(row.number, row.depth)
            if wanted != row.depth:
                assert not row.budget.is_contract
                row.depth, row.steps = wanted, 0
        decoding = [row for row in self.rows if row.fed == row.prompt]
        left, lanes, blocks, deepest, fed = orders.prompt_tokens, 0, 0, 0, []
        if not decoding:
            left = max(left, 1)
        for row in self.rows:
            if row.fed < row.prompt and left:
                if not row.fed:
                    row.prompt_depth = row.depth
                take = min(left, row.prompt - row.fed)
                left -= take
                lanes += take
                blocks += take * row.prompt_depth
                deepest = max(deepest, row.prompt_depth)
                row.fed += take
                fed.append(row)
        shape = StepShape(
            rows=len(decoding),
            union=max([deepest, *(row.depth for row in decoding)]),
            row_blocks=sum(row.depth for row in decoding),
            block_context=sum(row.depth * (row.fed + row.made) for row in decoding),
            prompt_lanes=lanes,
            prompt_blocks=blocks,
        )
        noise = math.exp(self.rng.gauss(0.0, self.noise))
        seconds = true_seconds(shape) * noise * self.slower(self.now)
        self.now += seconds + 0.3e-3
        gaps, firsts = [], []
        for row in decoding:
            row.gaps.append(self.now - row.last_s)
            gaps.append(row.gaps[-1])
            row.blocks += row.depth
        for row in fed:
            if row.fed == row.prompt:
                row.first_s = self.now
                firsts.append(row.ttft_s)
        for row in self.rows:
            if row.fed == row.prompt:
                row.made, row.steps, row.last_s = row.made + 1, row.steps + 1, self.now
        elastic = [row.depth for row in decoding if not row.budget.is_contract]
        if elastic:
            self.depths.append((self.now, max(elastic), len(self.rows)))
        control.report(
            StepReport(
                rows=len(decoding),
                union=shape.union,
                row_blocks=shape.row_blocks,
                block_context=shape.block_context,
                prompt_lanes=lanes,
                prompt_blocks=blocks,
                seconds=seconds,
                gaps_s=tuple(gaps),
                firsts_s=tuple(firsts),
            )
        )
        for row in [row for row in self.rows if row.made >= row.tokens]:
            row.done = True
            self.rows.remove(row)
            control.ended("length", usage_of(row), self.now - row.at_s)
        return orders.admits


def usage_of(row):
    return Usage(
        prompt_tokens=row.prompt,
        cached_tokens=0,
        completion_tokens=row.made,
        blocks_executed=row.blocks,
        budget_blocks=row.depth,
        blocks_per_token=row.blocks / max(len(row.gaps), 1),
        distinct_plans=1,
        source="fixed"
        if row.budget.is_contract
        else "deadline"
        if row.budget.has_deadline
        else "default",
        lowered_from=None,
    )


def poisson(rate, start_s, stop_s, *, seed=0, prompt=64, tokens=48, budget=None):
    """Requests at random times; lengths vary by half of what is named."""
    rng, at, made = Random(seed), start_s, []
    while True:
        at += rng.expovariate(rate)
        if at >= stop_s:
            return made
        made.append(
            Request(
                at_s=at,
                prompt=max(1, round(prompt * rng.uniform(0.5, 1.5))),
                tokens=max(2, round(tokens * rng.uniform(0.5, 1.5))),
                budget=budget or default(least=3, most=L),
            )
        )
