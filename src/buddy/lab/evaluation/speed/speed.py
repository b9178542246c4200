"""Prefill and decode speed by budget, beside transformers' own `generate` on the same weights.

What is timed is the product's own `forward` and `generate`; their trace takes the times, and for
transformers' own loop a forward hook. All
conditions run in every round, in a new order each time, so that a drift of the machine meets all
alike. Where the time goes is measured in passes of its own.
"""

import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from buddy.engine.clock import Clock, clock_of
from buddy.engine.run import check_reroute
from buddy.engine.state.sequence import Reroute
from buddy.engine.steer import BatchRoute, check_batch_route
from buddy.errors import PromptError
from buddy.generation.trace import DepthTrace
from buddy.lab.evaluation.conditions import Condition, plan_conditions
from buddy.lab.evaluation.speed.breakdown import profiled
from buddy.lab.evaluation.speed.speed_cells import Phase, Sample, Series, to_results
from buddy.model import BuddyForCausalLM
from buddy.settings import SEED, Range, check_ranges

OnPass = Callable[[int, int], None]
"""Called as `on_pass(passes done, passes in all)`."""

_GREEDY: Final = {"do_sample": False, "repetition_penalty": None, "eos_token_id": None}
"""The likeliest token each time, and no early end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedConfig:
    """How much is run."""

    new_tokens: Annotated[int, Range(2, 2**24)] = 64
    """Length of a generation; the first token comes of its prefill, the others of decode steps."""
    rounds: Annotated[int, Range(1, 10**6)] = 5
    """Rounds that count; one more warms up."""
    reroute: Reroute = "step"
    """When generation chooses blocks again."""
    batch_route: BatchRoute = "independent"
    """Whose scores rank the blocks of a batch."""
    transformers: bool = True
    """Whether transformers' own `generate` runs too."""
    seed: Annotated[int, SEED] = 0
    """Seed of the order within each round."""

    def __post_init__(self) -> None:
        check_reroute(self.reroute)
        check_batch_route(self.batch_route)
        check_ranges(self, PromptError)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed.

    Attributes:
        module: Called, and asked to generate.
        options: What it is given besides the tokens.
        series: Where its times go.
    """

    module: nn.Module
    options: dict[str, Any]
    series: Series

    @torch.no_grad()
    def prefill(self, ids: Int[Tensor, "batch context"]) -> Any:
        """One forward pass that keeps its cache, with logits of the last position."""
        return self.module(ids, use_cache=True, logits_to_keep=1, **self.options)

    def generate(
        self, ids: Int[Tensor, "batch context"], new_tokens: int, **more: Any
    ) -> Int[Tensor, "batch columns"]:
        """Greedy decode of that many tokens, by the loop of the product."""
        tokens = cast(Any, self.module).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            **_GREEDY,
            **self.options,
            **more,
        )
        return cast(Tensor, tokens)


def measure_speed(
    model: BuddyForCausalLM,
    conditions: Sequence[Condition],
    prompts: Int[Tensor, "prompts batch context"],
    config: SpeedConfig | None = None,
    *,
    clock: Clock | None = None,
    on_pass: OnPass = lambda done, total: None,
) -> dict[str, Any]:
    """Time every condition, and full depth, in every round.

    Args:
        model: Whose weights all of them share, transformers' own `generate` included.
        conditions: Policies and budgets.
        prompts: A batch for each round, taken in turn; all conditions of a round share it.
        config: How much is run.
        clock: In place of the one that fits the device.
        on_pass: Told of progress.

    Returns:
        The results of an `eval-speed` record: `cells`, `rounds`, `peak_memory_bytes`.

    Raises:
        PromptError: The context does not hold the prompt and the new tokens.
    """
    config = config or SpeedConfig()
    batch, context = prompts.shape[1:]
    check_context(model, context, config.new_tokens)
    clock = clock or clock_of(model.device)
    subjects = subjects_of(model, conditions, config)
    shuffle = random.Random(config.seed)
    total, done = (config.rounds + 1) * len(subjects), 0
    on_pass(done, total)
    for number in range(config.rounds + 1):
        ids = prompts[number % len(prompts)].to(model.device)
        for subject in shuffle.sample(subjects, len(subjects)):
            sample = time_once(subject, ids, config.new_tokens, clock)
            if number:  # the first round warms up
                subject.series.samples.append(sample)
                profile_once(subject, ids, config.new_tokens, clock)
            done += 1
            on_pass(done, total)
    series = [subject.series for subject in subjects]
    return {
        **to_results(series, num_blocks=model.num_blocks, batch=batch, context=context),
        "peak_memory_bytes": _peak_memory(set(model.backbone.devices)),
    }


def check_context(model: BuddyForCausalLM, context: int, new_tokens: int) -> None:
    """Refuse lengths that the model cannot run.

    Raises:
        PromptError: The model's context does not hold the prompt and the new tokens.
    """
    limit = model.config.max_position_embeddings
    if context + new_tokens - 1 > limit:
        raise PromptError(
            f"{context} tokens of context and {new_tokens} new ones do not fit: the model's "
            f"context holds {limit}; ask for less of either"
        )


def subjects_of(
    model: BuddyForCausalLM, conditions: Sequence[Condition], config: SpeedConfig
) -> list[Subject]:
    """Transformers' own generate, full depth, and every condition, all on the same weights."""
    conditions = list(conditions)
    if not any(Series(condition).is_dense for condition in conditions):
        conditions = [*plan_conditions(model, ("full",)), *conditions]
    subjects = [Subject(model.model, {}, Series(None))] if config.transformers else []
    for condition in conditions:
        module = BuddyForCausalLM(
            model.model,
            policy=condition.policy,
            kv_policy=model.kv_policy,
            engine=model.executor.engine,
        )
        options = {
            "budget": condition.source,
            "reroute": config.reroute,
            "batch_route": config.batch_route,
        }
        subjects.append(Subject(module, options, Series(condition)))
    return subjects


def time_once(
    subject: Subject, ids: Int[Tensor, "batch context"], new_tokens: int, clock: Clock
) -> Sample:
    """Time one prefill and one generation; a decode step is timed from end to end of a forward."""
    prefill_s = _span_s(clock, lambda: subject.prefill(ids))
    condition = subject.series.condition
    if condition is None:
        ends = _ends_by_hook(subject, ids, new_tokens, clock)
        mean_blocks: dict[Phase, float] | None
        num_plans, engine, mean_blocks = 1, None, None
    else:
        trace = DepthTrace(clock=clock.mark)
        subject.generate(ids, new_tokens, trace=trace)
        ends = [step.ended_s for step in trace.steps]
        num_plans, engine = trace.distinct_plans, trace.decode_engine
        first, *others = trace.steps
        mean_blocks = {
            "prefill": first.spent / first.fed,
            "decode": trace.decode_blocks_per_token,
        }
        if not condition.is_free:
            assert set(first.executed) == {condition.budget.prompt}
            assert all(set(step.executed) == {condition.blocks} for step in others)
    # A record says how many blocks and tokens it timed, so they are counted.
    assert len(ends) == new_tokens
    steps_s = [clock.seconds(start, stop) for start, stop in itertools.pairwise(ends)]
    latency_s: dict[Phase, float] = {"prefill": prefill_s, "decode": statistics.median(steps_s)}
    return Sample(latency_s, num_plans, engine, mean_blocks)


def _ends_by_hook(
    subject: Subject, ids: Int[Tensor, "batch context"], new_tokens: int, clock: Clock
) -> list[Any]:
    """When each forward of transformers' own loop ended."""
    ends: list[Any] = []
    with after_forward(subject.module, lambda output: ends.append(clock.mark())):
        subject.generate(ids, new_tokens)
    return ends


@contextmanager
def after_forward(module: nn.Module, note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with the output of every forward pass, until the block ends."""
    handle = module.register_forward_hook(lambda module, arguments, output: note(output))
    try:
        yield
    finally:
        handle.remove()


def profile_once(
    subject: Subject, ids: Int[Tensor, "batch context"], new_tokens: int, clock: Clock
) -> None:
    """Run the same again to see where the time goes; transformers' own is not taken apart."""
    if subject.series.condition is None:
        return
    ends: list[tuple[Any, int]] = []
    with profiled(clock) as profiler:
        prefill_s = _span_s(clock, lambda: subject.prefill(ids))
        prefill = profiler.breakdown(prefill_s)

        def note() -> Any:
            ends.append((clock.mark(), profiler.position))
            return ends[-1][0]

        subject.generate(ids, new_tokens, trace=DepthTrace(clock=note))
    # The first mark is the beginning of the prefill, the second its end.
    (start, begin), (stop, end) = ends[1], ends[-1]
    decode = profiler.breakdown(clock.seconds(start, stop), begin, end)
    subject.series.pieces["prefill"].append(prefill)
    subject.series.pieces["decode"].append(decode)


def _span_s(clock: Clock, run: Callable[[], Any]) -> float:
    start = clock.mark()
    run()
    return clock.seconds(start, clock.mark())


def _peak_memory(devices: set[torch.device]) -> int | None:
    """Most bytes in use since the process began: on these devices, or resident on Linux."""
    if {device.type for device in devices} == {"cuda"}:
        return sum(map(torch.cuda.max_memory_allocated, devices))
    if sys.platform != "linux":
        return None
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
