"""Does it pay to choose a replica by a request's budget? A simulation of discrete events.

Replicas of one model batch continuously: a step feeds one token of each answer and a chunk of the
prompts that wait. It takes what benchmarks/scaling.py says, which is arithmetic and no measurement.
Requests come at random times whatever happens, with lengths and budgets drawn from one seed.

    random     any replica
    shortest   the one with the fewest requests
    classes    the same, among the replicas of the budget's class; as deploy/replicas.py chooses
    marginal   where the request delays all others and itself least, by the cost of a step

    python benchmarks/balancing.py --out results/scaling/balancing.json
"""

import heapq
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from scaling import GROUPS, H100, MODELS, ROOT, measured_machine, step_parts, table

from buddy.lab import experiment
from buddy.records import read_record
from buddy.serving.control.protocol import StepShape

SHARES = {0.5: 0.5, 0.75: 0.25, 1.0: 0.25}
"""Share of the requests, by budget."""
CHUNK = 512
"""Tokens of prompts that a step feeds at most."""
MAX_ROWS = 256
"""Answers at once."""


@dataclass(slots=True)
class Request:
    """One request, and what became of it."""

    at_s: float
    prompt: int
    tokens: int
    depth: int
    """Blocks that each of its tokens runs."""
    fed: int = 0
    first_s: float = math.nan
    last_s: float = math.nan

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.at_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between tokens; 0 of a single one."""
        return (self.last_s - self.first_s) / max(self.tokens - 1, 1)


def requests(rate: float, seconds: float, num_blocks: int, seed: int) -> list[Request]:
    """Requests at random times; lengths are log-normal, means about 300 in and 130 out."""
    draw, at, made = Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        (share,) = draw.choices([*SHARES], [*SHARES.values()])
        made.append(
            Request(
                at_s=at,
                prompt=min(2048, max(8, round(draw.lognormvariate(math.log(220), 0.8)))),
                tokens=min(1024, max(2, round(draw.lognormvariate(math.log(100), 0.7)))),
                depth=round(share * num_blocks),
            )
        )
    return made


@dataclass(slots=True)
class Replica:
    """One batch that steps, and those who wait for it.

    Attributes:
        decoding: Rows whose prompts are fed, by depth.
        block_context: Over them, blocks times tokens that each looks at.
        ends: Of them, the number of the step that makes the last token.
        present: Requests that are not over, by depth.
    """

    seconds: Callable[[StepShape], float]
    is_nested: bool
    num_blocks: int
    waiting: deque[Request] = field(default_factory=deque)
    feeding: deque[Request] = field(default_factory=deque)
    decoding: Counter[int] = field(default_factory=Counter)
    block_context: int = 0
    ends: list[tuple[int, int, Request]] = field(default_factory=list)
    fed: list[Request] = field(default_factory=list)
    present: Counter[int] = field(default_factory=Counter)
    step: int = 0
    is_busy: bool = False
    answers: int = 0
    row_blocks_done: int = 0
    busy_s: float = 0.0

    @property
    def load(self) -> int:
        """Requests that are not over."""
        return self.present.total()

    def take(self, request: Request) -> None:
        """Let a request wait."""
        self.waiting.append(request)
        self.present[request.depth] += 1

    def union(self, depths: Counter[int]) -> int:
        """Blocks that any lane of a step runs.

        With nested plans those of the deepest. With plans of their own the mean over random ones,
        rounded.
        """
        if self.is_nested:
            return max((depth for depth, rows in depths.items() if rows), default=0)
        free = self.num_blocks - 2
        skipped = math.prod((1 - (depth - 2) / free) ** rows for depth, rows in depths.items())
        return round(2 + free * (1 - skipped))

    def begin(self) -> float:
        """Choose what the next step feeds; gives its seconds."""
        while self.waiting and len(self.feeding) + len(self.ends) < MAX_ROWS:
            self.feeding.append(self.waiting.popleft())
        left, lanes, prompt_blocks, self.fed = CHUNK, 0, 0, []
        depths = self.decoding.copy()
        for request in self.feeding:
            take = min(left, request.prompt - request.fed)
            if not take:
                break
            left -= take
            lanes += take
            prompt_blocks += take * request.depth
            request.fed += take
            depths[request.depth] += 1
            if request.fed == request.prompt:
                self.fed.append(request)
        row_blocks = _row_blocks(self.decoding)
        shape = StepShape(
            rows=len(self.ends),
            union=self.union(depths),
            row_blocks=row_blocks,
            block_context=self.block_context,
            prompt_lanes=lanes,
            prompt_blocks=prompt_blocks,
        )
        self.row_blocks_done += row_blocks
        self.is_busy = True
        taken = self.seconds(shape)
        self.busy_s += taken
        return taken

    def end(self, now: float) -> None:
        """Give out what the step made: a token of each row, and first ones."""
        self.step += 1
        self.is_busy = False
        self.block_context += _row_blocks(self.decoding)
        while self.ends and self.ends[0][0] == self.step:
            _, _, request = heapq.heappop(self.ends)
            request.last_s = now
            self.present[request.depth] -= 1
            self.decoding[request.depth] -= 1
            self.block_context -= request.depth * (request.prompt + request.tokens - 1)
        for request in self.fed:
            self.feeding.remove(request)
            request.first_s = request.last_s = now
            if request.tokens == 1:
                self.present[request.depth] -= 1
                continue
            self.answers += 1
            heapq.heappush(self.ends, (self.step + request.tokens - 1, self.answers, request))
            self.decoding[request.depth] += 1
            self.block_context += request.depth * request.prompt

    def delay(self, depth: int) -> float:
        """Seconds that a request more costs at each step: its own, and what it adds to others'."""
        rows = self.present.total()
        context = self.block_context / max(_row_blocks(self.decoding), 1)

        def step_s(depths: Counter[int]) -> float:
            row_blocks = _row_blocks(depths)
            shape = StepShape(
                rows=depths.total(),
                union=self.union(depths),
                row_blocks=row_blocks,
                block_context=round(context * row_blocks),
            )
            return self.seconds(shape)

        after = step_s(self.present + Counter({depth: 1}))
        return after + rows * (after - step_s(self.present)) if rows else after


def _row_blocks(depths: Counter[int]) -> int:
    return sum(depth * rows for depth, rows in depths.items())


def shares_of(num_replicas: int, num_blocks: int) -> dict[int, list[int]]:
    """Which replicas serve which depth: as many as its share of the work, and one at least."""
    work = {round(share * num_blocks): part * share for share, part in SHARES.items()}
    if num_replicas < len(work):
        return {depth: list(range(num_replicas)) for depth in work}
    given = dict.fromkeys(work, 1)
    while sum(given.values()) < num_replicas:
        given[max(work, key=lambda depth: work[depth] / given[depth])] += 1
    first, found = 0, {}
    for depth, number in given.items():
        found[depth] = list(range(first, first + number))
        first += number
    return found


def balance(
    policy: str,
    replicas: Sequence[Replica],
    request: Request,
    draw: Random,
    own: dict[int, list[int]],
) -> Replica:
    """The replica that a request is given to; ties go to the first."""
    if policy == "random":
        return draw.choice(replicas)
    if policy == "marginal":
        return min(replicas, key=lambda replica: replica.delay(request.depth))
    among = [replicas[at] for at in own[request.depth]] if policy == "classes" else replicas
    return min(among, key=lambda replica: replica.load)


POLICIES = ("random", "shortest", "classes", "marginal")


def simulate(
    todo: Sequence[Request],
    policy: str,
    *,
    seconds: Callable[[StepShape], float],
    num_replicas: int,
    num_blocks: int,
    is_nested: bool = True,
    seed: int = 0,
) -> list[Replica]:
    """Serve all requests to their end; they are changed in place.

    Args:
        todo: Requests, in the order of time.
        policy: One of `POLICIES`.
        seconds: Of a step.
        num_replicas: That share them.
        num_blocks: Of the model.
        is_nested: Whether all plans come of one order.
        seed: Of `random`'s choice.

    Returns:
        The replicas, with what they did.
    """
    replicas = [Replica(seconds, is_nested, num_blocks) for _ in range(num_replicas)]
    draw, own = Random(seed), shares_of(num_replicas, num_blocks)
    events: list[tuple[float, int]] = []  # ends of steps: seconds, and whose
    arrivals = deque(todo)
    while arrivals or events:
        if arrivals and (not events or arrivals[0].at_s <= events[0][0]):
            request = arrivals.popleft()
            now = request.at_s
            replica = balance(policy, replicas, request, draw, own)
            replica.take(request)
        else:
            now, at = heapq.heappop(events)
            replica = replicas[at]
            replica.end(now)
        if not replica.is_busy and replica.load:
            heapq.heappush(events, (now + replica.begin(), replicas.index(replica)))
    return replicas


def p95(values):
    """The 95th percentile."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def read_arguments():
    """The command line."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--slo-ttft-ms", type=float, default=500.0)
    parser.add_argument("--out", type=Path, help="record to write; without it tables alone")
    return parser.parse_args()


CASES = {
    "Llama-3-8B": {"slo_itl_ms": 12.0, "rates": (20, 40, 60, 80, 100)},
    "Llama-3-70B": {"slo_itl_ms": 14.0, "rates": (10, 20, 30, 40, 50)},
}
"""Promised time between tokens, and requests a second for each replica."""


def point(args, name, slo_itl_ms, policy, rate, is_nested):
    """Figures of one load, over the seeds.

    Two promises are counted: the same time between tokens for all, and times that go with budgets.
    """
    model, ranks = MODELS[name], GROUPS[name]
    served, spent = [], 0.0
    for seed in range(args.seeds):
        todo = requests(rate * args.replicas, args.duration, model.num_blocks, seed)
        replicas = simulate(
            todo,
            policy,
            seconds=lambda shape: step_parts(shape, model, H100, ranks).total,
            num_replicas=args.replicas,
            num_blocks=model.num_blocks,
            is_nested=is_nested,
            seed=seed,
        )
        served += todo
        spent += sum(replica.busy_s for replica in replicas)
    in_time = [request for request in served if 1e3 * request.ttft_s <= args.slo_ttft_ms]
    good = [request for request in in_time if 1e3 * request.itl_s <= slo_itl_ms]
    by_budget = [
        request
        for request in in_time
        if 1e3 * request.itl_s <= slo_itl_ms * request.depth / model.num_blocks
    ]
    least = min(request.depth for request in served)
    return {
        "rate": rate,
        "policy": policy,
        "is_nested": is_nested,
        "requests": len(served),
        "good_share": len(good) / len(served),
        "good_share_by_budget": len(by_budget) / len(served),
        "ttft_ms_p95": 1e3 * p95([request.ttft_s for request in served]),
        "itl_ms_p95": 1e3 * p95([request.itl_s for request in served]),
        "itl_ms_mean_shallow": 1e3
        * statistics.mean(request.itl_s for request in served if request.depth == least),
        "busy_s_per_request": spent / len(served),
    }


COLUMNS = {
    **{(policy, True): f"{policy}" for policy in POLICIES},
    **{(policy, False): f"{policy}, plans of their own" for policy in ("random", "classes")},
}
"""Columns of the tables: policy, and whether all plans come of one order."""


def show(name, case):
    """The two tables of a model."""
    cells = {
        (point["policy"], point["is_nested"], point["rate"]): point for point in case["points"]
    }

    def rows(cell):
        return [[rate, *(cell(cells[*key, rate]) for key in COLUMNS)] for rate in case["rates"]]

    head = ["requests/s a replica", *COLUMNS.values()]
    table(
        f"{name}: good answers of 100, with one SLO / with SLOs in proportion to budgets",
        head,
        rows(
            lambda cell: (
                f"{100 * cell['good_share']:.0f} / {100 * cell['good_share_by_budget']:.0f}"
            )
        ),
    )
    table(
        f"{name}: ms between tokens, 95th percentile of answers / mean at a budget of 50 %",
        head,
        rows(lambda cell: f"{cell['itl_ms_p95']:.1f} / {cell['itl_ms_mean_shallow']:.1f}"),
    )


def checked(folder):
    """One replica on two cores, simulated with constants of one dense step, beside its server.

    Args:
        folder: Of the records of `benchmarks/goodput.py`. Points at which nobody was refused count.
    """
    model, found = MODELS["SmolLM2-135M"], []
    cells = read_record(ROOT / "results" / "engine.json")["results"]["shapes"][0]["cells"]
    machine, head_s = measured_machine(cells["dense"], 256)

    def seconds(shape):
        parts = step_parts(shape, model, machine)
        return parts.total - parts.head + head_s

    for name, depth in (("full", 30), ("half", 15)):
        for measured in read_record(folder / f"{name}.json")["results"]["points"]:
            if measured["refused"]:
                continue
            draw = Random(0)
            at, todo = 0.0, []
            while (at := at + draw.expovariate(measured["offered_rps"])) < 300:
                todo.append(Request(at_s=at, prompt=40, tokens=64, depth=depth))
            simulate(todo, "random", seconds=seconds, num_replicas=1, num_blocks=30)
            found.append(
                {
                    "blocks": depth,
                    "offered_rps": measured["offered_rps"],
                    "simulated_itl_ms": 1e3 * statistics.median(request.itl_s for request in todo),
                    "measured_itl_ms": measured["itl_ms_p50"],
                }
            )
    return found


def show_checked(found):
    """Simulated beside measured."""
    table(
        "One server of SmolLM2-135M on two cores: median ms between tokens",
        ["blocks", "requests/s", "simulated", "measured"],
        [
            [
                row["blocks"],
                *(
                    f"{row[key]:.1f}"
                    for key in ("offered_rps", "simulated_itl_ms", "measured_itl_ms")
                ),
            ]
            for row in found
        ],
    )


def main():
    """Simulate, show, record."""
    args = read_arguments()
    results = {"checked": checked(ROOT / "results" / "serving")}
    show_checked(results["checked"])
    for name, case in CASES.items():
        points = [
            point(args, name, case["slo_itl_ms"], policy, rate, is_nested)
            for is_nested in (True, False)
            for policy in POLICIES
            for rate in case["rates"]
        ]
        results[name] = {**case, "points": points}
        show(name, results[name])
    if args.out is not None:
        config = {key: str(value) for key, value in vars(args).items()}
        config |= {"shares": {str(key): part for key, part in SHARES.items()}, "chunk": CHUNK}
        config |= {"max_rows": MAX_ROWS, "groups": GROUPS}
        experiment.save(args.out, "balancing", results, config=config)


if __name__ == "__main__":
    experiment.run(main)
