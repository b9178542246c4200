"""Measures a model's steps when the server starts, once for each machine; the fit is kept.

`<home>/costs/<key>.json` holds the fit. A file that is damaged costs another measurement.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from buddy import __version__
from buddy.budget.blocks import least_blocks
from buddy.budget.source import ConstantBudget
from buddy.engine.clock import wait_for
from buddy.engine.executors.native.decoder import ANY_NUMBER
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.state.sequence import SequenceState
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute
from buddy.engine.step import Step
from buddy.errors import BuddyError, ResultError
from buddy.files import read_json, write_text
from buddy.hub.folder import cache_home
from buddy.records import processor
from buddy.serving.control.cost import CostModel, fit
from buddy.serving.control.protocol import StepShape
from buddy.serving.rows.passes import fits_one_pass

if TYPE_CHECKING:
    from buddy.inference import InferenceModel

SECONDS: Final = 5.0
"""That a measurement may take."""
_FORMAT: Final = 2
"""Raised when what is measured, or how it is fitted, changes."""
_ROUNDS: Final = 4
_FAR: Final = 2.0
"""Times slower or faster at which a kept fit is of another machine."""
_TRIES: Final = 5
_MOST_CACHE_BYTES: Final = 256 * 2**20
_LOG: Final = logging.getLogger("buddy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One kind of step that is measured."""

    depths: tuple[int, ...] = ()
    """Blocks of each row that decodes."""
    context: int = 0
    """Tokens in the cache of each."""
    prompt: int = 0
    """Tokens of a new prompt, fed along."""
    prompt_depth: int = 0

    @property
    def shape(self) -> StepShape:
        """What the cost model is told."""
        return StepShape.of_rows(
            self.depths,
            [self.context + 1] * len(self.depths),
            prompt_lanes=self.prompt,
            prompt_depth=self.prompt_depth,
        )


class Bench:
    """Runs steps on a model as the engine's thread does, on caches of any length.

    Args:
        model: That will be served.
        rows: That there will be at most.
        batch_route: Whose scores rank the blocks.
    """

    def __init__(
        self, model: "InferenceModel", rows: int, batch_route: BatchRoute = "shared"
    ) -> None:
        self._model, self._route = model, batch_route
        self.num_blocks = model.num_blocks
        self.longest = min(1024, model.backbone.context)
        self._session: Session = model.new_session(rows + 1, self.longest)
        model.executor.refresh()
        self._executor = model.executor.fast_path()
        self._policy = model.inference_policy()
        kv, backbone = self._session.kv, model.backbone
        kv.allocate(backbone.kv_width // backbone.head_dim, backbone.head_dim, model.dtype)
        self._written = [0] * (rows + 1)

    @torch.no_grad()
    def run(self, sample: Sample, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of one step, without what follows it: sampling, and logits where it made none."""
        numbers = [self._session.join() for _ in sample.depths]
        sequences = [
            SequenceState(
                row=self._session.sequences[number].row,
                source=ConstantBudget(depth),
                length=sample.context,
                steps=1,
            )
            for number, depth in zip(numbers, sample.depths, strict=True)
        ]
        self._write([sequence.row for sequence in sequences], sample.context)
        counts = [1] * len(sequences)
        if sample.prompt:
            number = self._session.join(ConstantBudget(sample.prompt_depth))
            numbers.append(number)
            sequences.append(self._session.sequences[number])
            counts.append(sample.prompt)
        backbone = self._model.backbone
        token, device = 5 % backbone.embedding.num_embeddings, backbone.device
        parts = self._passes(
            len(sample.depths), [sequence.length for sequence in sequences], counts
        )
        feeds = [
            Feed(
                token_ids=torch.full((sum(counts[part]),), token, device=device),
                counts=tuple(counts[part]),
            )
            for part in parts
        ]
        started_s = clock()
        for part, feed in zip(parts, feeds, strict=True):
            step = Step(
                sequence_ids=numbers[part],
                feed=feed,
                sequences=sequences[part],
                batch_route=self._route,
            )
            run_step(backbone, self._policy, self._session, step, executor=self._executor)
        wait_for(backbone.devices)
        taken = clock() - started_s
        self._session.leave(*numbers)
        return taken

    def _passes(self, rows: int, starts: Sequence[int], counts: Sequence[int]) -> list[slice]:
        """All in one pass, or the prompt in one of its own, as the engine's thread has it."""
        if rows in (0, len(counts)) or fits_one_pass(self._executor, starts, counts):
            return [slice(None)]
        return [slice(0, rows), slice(rows, None)]

    def _write(self, rows: Sequence[int], slots: int) -> None:
        """Have real memory behind a cache that nothing was fed to."""
        for row in rows:
            have = self._written[row]
            if slots > have:
                for buffers in self._session.kv.buffers()[:2]:
                    for buffer in buffers:
                        if buffer is not None:
                            buffer[row, :, have:slots] = 0.01
                self._written[row] = slots


def samples(
    num_blocks: int,
    rows: int,
    longest: int,
    token_bytes: float,
    *,
    num_pinned: int = 1,
    seed: int = 0,
) -> Iterator[list[Sample]]:
    """What is measured, by round; the first steps of a round say most.

    Args:
        num_blocks: Of the model.
        rows: At most.
        longest: Tokens of a cache.
        token_bytes: That a token takes in the cache.
        num_pinned: Blocks that run whatever the budget.
        seed: Of the order.
    """
    least, full = least_blocks(num_blocks, num_pinned), num_blocks
    half = max(least, num_blocks // 2)
    sizes = sorted({*(size for size in (1, 2, 4, 8, 16, 32) if size < rows), rows})
    room = int(_MOST_CACHE_BYTES / max(token_bytes, 1.0))
    short = min(32, longest // 2)
    long = [max(short, min(longest - 8, 512, room // size)) for size in sizes]
    decode = [
        Sample(depths=(depth,) * size, context=context)
        for size, far in zip(sizes, long, strict=True)
        for depth, context in ((full, short), (half, far), (full, far), (half, short))
    ]
    quarter = max(least, num_blocks // 4)
    mixed = [
        Sample(depths=tuple((full, half, quarter)[at % 3] for at in range(size)), context=short)
        for size in sizes
        if size > 2
    ]
    lanes = [tokens for tokens in (16, 64, 256) if tokens <= longest]
    prompts = [Sample(prompt=tokens, prompt_depth=d) for tokens in lanes for d in (full, half)]
    along = [
        Sample(depths=(depth,) * size, context=short, prompt=tokens, prompt_depth=depth)
        for size, tokens, depth in zip(
            sizes[1:], cycle((24, 48, 128)), cycle((full, full, half)), strict=False
        )
        if tokens <= longest
    ]
    rng = Random(seed)
    corners = [decode[0], decode[3], decode[-4], decode[-3], *prompts[-2:], prompts[0]]
    rest = [sample for sample in (*decode, *mixed, *prompts, *along) if sample not in corners]
    for number in count():
        rng.shuffle(rest)
        yield (
            [*corners, *rest]
            if number == 0
            else rng.sample([*corners, *rest], len(rest) + len(corners))
        )


def measure(
    model: "InferenceModel",
    rows: int,
    *,
    batch_route: BatchRoute = "shared",
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[StepShape], list[float]]:
    """Steps of a model and the seconds that they took.

    Args:
        model: That will be served.
        rows: At most.
        batch_route: Whose scores rank the blocks.
        seconds: No step begins later; the first seven are measured in any case.
        clock: In seconds.
    """
    ends_s = clock() + seconds
    bench = Bench(model, rows, batch_route)
    shapes: list[StepShape] = []
    taken: list[float] = []
    token_bytes = 2.0 * model.backbone.kv_width * model.dtype.itemsize * model.num_blocks
    rounds = samples(
        model.num_blocks, rows, bench.longest, token_bytes, num_pinned=model.policy.num_pinned
    )
    for number, plan in zip(range(_ROUNDS), rounds, strict=False):
        if number == 0:
            bench.run(plan[0], clock)  # what is made once is no part of a step
        for place, sample in enumerate(plan):
            if clock() > ends_s and (number, place) >= (0, 7):
                return shapes, taken
            shapes.append(sample.shape)
            taken.append(bench.run(sample, clock))
    return shapes, taken


def plain_lanes(model: "InferenceModel") -> int:
    """New tokens up to which a prompt's cost what an answer's do: where the kernel takes no more.

    Where it takes prompts of any length, their products are its own, and longer ones cost less.
    """
    most: int = getattr(model.executor.fast_path(), "most_lanes", 0)
    return 0 if most == ANY_NUMBER else most


def cost_of(
    model: "InferenceModel",
    rows: int,
    *,
    batch_route: BatchRoute = "shared",
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """The cost model of a model on this machine, from the cache or measured now.

    What was kept is measured anew where a step takes half or twice as long now: it may be of an
    hour in which others used the machine.

    Args:
        model: That will be served.
        rows: At most.
        batch_route: Whose scores rank the blocks.
        seconds: That a measurement may take.
        clock: In seconds.
    """
    plain = plain_lanes(model)
    identity = {
        "format": _FORMAT,
        "plain": plain,
        "version": __version__,
        "model": model.facts(),
        "dtype": str(model.dtype),
        "quant": model.origin.quant,
        "kv_policy": model.kv_policy,
        "policy": getattr(model.policy, "name", ""),
        "engine": model.executor.name,
        "instructions": model.executor.instructions,
        "device": ", ".join(map(str, dict.fromkeys(model.backbone.devices))),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "rows": rows,
        "batch_route": batch_route,
    }
    written = json.dumps(identity, sort_keys=True)
    path = cache_home() / "costs" / f"{hashlib.sha256(written.encode()).hexdigest()}.json"
    if os.path.exists(path):
        try:
            kept_cost = _read(read_json(path, ResultError), json.loads(written), plain)
            _check(kept_cost, Bench(model, rows, batch_route), clock)
            return kept_cost
        except ResultError as error:
            _LOG.warning("the cached cost of a step cannot be used (%s): measured anew", error)
    _LOG.info("measuring what a step costs, at most %g s, once for this machine and model", seconds)
    steps = measure(model, rows, batch_route=batch_route, seconds=seconds, clock=clock)
    cost = fit(*steps, plain)
    content = {"identity": identity, "coefficients": cost.coefficients}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, indent=2) + "\n")
    except (OSError, BuddyError) as error:
        _LOG.warning("the cost that was measured is not kept: %s", error)
    return cost


def _check(cost: CostModel, bench: Bench, clock: Callable[[], float]) -> None:
    """Refuse a fit that is far from what one step takes now.

    Raises:
        ResultError: It is.
    """
    sample = Sample(depths=(bench.num_blocks,), context=min(32, bench.longest // 2))
    bench.run(sample, clock)
    now = median(bench.run(sample, clock) for _ in range(_TRIES)) / cost.predict(sample.shape)
    if not 1 / _FAR <= now <= _FAR:
        raise ResultError(f"a step takes {now:.2g} times as long now")


def _read(content: Any, identity: dict[str, Any], plain: int) -> CostModel:
    if not isinstance(content, dict) or content.get("identity") != identity:
        raise ResultError("it is of another model or machine")
    numbers = content.get("coefficients")
    if not isinstance(numbers, list) or not all(type(number) is float for number in numbers):
        raise ResultError("its coefficients are no numbers")
    return CostModel(tuple(numbers), plain)
