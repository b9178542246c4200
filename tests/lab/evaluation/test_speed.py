"""Speed: what is recorded is what the clock said, and the time taken apart adds up."""

import math
import statistics

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.backbone.backbone import Backbone
from buddy.engine.clock import HostClock
from buddy.errors import PolicyError, PromptError
from buddy.generation.trace import DepthTrace
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.speed.breakdown import PIECES, profiled
from buddy.lab.evaluation.speed.speed import (
    SpeedConfig,
    after_forward,
    measure_speed,
    subjects_of,
    time_once,
)
from buddy.lab.evaluation.speed.speed_cells import PHASES, Sample, Series, ideal_speedup, to_results
from tests.product.policies.made import gated
from tests.tiny import NUM_BLOCKS, random_ids, random_router, tiny_model

BATCH, CONTEXT, NEW = 2, 9, 5


def made(engine):
    plain = tiny_model()
    router = random_router(plain, summary="ema", ema_decay=0.5)
    return BuddyForCausalLM(plain, router=router, policy="static:3,1,2,4", engine=engine)


@pytest.fixture(scope="module")
def model():
    return made("auto")


@pytest.fixture
def prompts():
    return random_ids(3 * BATCH, CONTEXT).view(3, BATCH, CONTEXT)


class WorkClock:
    """Stands still, but for the work that it is told of."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def seconds(self, start, stop):
        return stop - start

    def after(self, module, cost):
        """Every call of this module takes that long."""

        def tick(*_):
            self.now += cost

        return module.register_forward_hook(tick)


@pytest.fixture(scope="module")
def general():
    """Its blocks are modules, whose calls a clock can be told of."""
    return made("general")


@pytest.fixture
def work(general):
    """A block takes 1 s, the head 2 s, the embedding 0.5 s, all else nothing."""
    clock = WorkClock()
    hf = general.model
    costs = [(block, 1.0) for block in hf.model.layers]
    costs += [(hf.lm_head, 2.0), (hf.model.embed_tokens, 0.5)]
    handles = [clock.after(module, cost) for module, cost in costs]
    yield clock
    for handle in handles:
        handle.remove()


def measure(model, prompts, clock, *, budgets=("1.0", "4 blocks", "3 blocks"), **config):
    return measure_speed(
        model,
        plan_conditions(model, (), budgets),
        prompts,
        SpeedConfig(new_tokens=NEW, rounds=2, **config),
        clock=clock,
    )


def test_what_is_recorded_is_what_the_clock_said(general, prompts, work):
    cells = measure(general, prompts, work)["cells"]
    assert [(cell["label"], cell["policy"], cell["blocks"]) for cell in cells[::2]] == [
        ("transformers", None, 6),
        ("buddy", "full", 6),
        ("buddy", "static:3,1,2,4", 4),
        ("buddy", "static:3,1,2,4", 3),
    ]
    for cell in cells:
        seconds = cell["blocks"] + 2.5
        tokens = BATCH * (CONTEXT if cell["phase"] == "prefill" else 1)
        assert cell["latency_ms"] == cell["latency_ms_min"] == cell["latency_ms_max"]
        assert cell["latency_ms"] == pytest.approx(1e3 * seconds)
        assert cell["tokens_per_s"] == pytest.approx(tokens / seconds)
        assert cell["speedup_own_dense"] == pytest.approx(8.5 / seconds)
        assert cell["speedup_transformers"] == pytest.approx(8.5 / seconds)
        # Nothing but blocks, head and embedding takes time here: the ideal is reached.
        assert cell["ideal_speedup"] == pytest.approx(8.5 / seconds)
        assert (cell["batch"], cell["context"]) == (BATCH, CONTEXT)
        if cell["label"] == "buddy":
            assert cell["shares"]["blocks"] == pytest.approx(cell["blocks"] / seconds)
            assert cell["shares"]["head"] == pytest.approx(2 / seconds)
            assert cell["shares"]["host"] == pytest.approx(0.5 / seconds)
        else:
            assert cell["shares"] is None


def test_the_schema_is_what_plots_read(model, prompts):
    results = measure(model, prompts, None)
    expected = {
        "label": str,
        "policy": str,
        "phase": str,
        "blocks": int,
        "num_blocks": int,
        "batch": int,
        "context": int,
        "tokens_per_s": float,
        "latency_ms": float,
        "latency_ms_min": float,
        "latency_ms_max": float,
        "speedup_own_dense": float,
        "speedup_transformers": float,
        "ideal_speedup": float,
        "shares": dict,
    }
    for cell in results["cells"]:
        assert list(cell) == list(expected)
        theirs = cell["label"] == "transformers"
        assert {name for name, value in cell.items() if value is None} == (
            {"policy", "shares"} if theirs else set()
        )
        assert all(v is None or type(v) is expected[name] for name, v in cell.items())
        if not theirs:
            assert set(cell["shares"]) == set(PIECES)
            assert min(cell["shares"].values()) >= 0
            assert math.isclose(sum(cell["shares"].values()), 1)
            assert cell["shares"]["blocks"] > 0
            assert cell["shares"]["head"] > 0
    assert results["peak_memory_bytes"] > 0
    assert all(len(made[f"{phase}_ms"]) == 2 for made in results["rounds"] for phase in PHASES)


def test_ratios_are_taken_within_each_round_and_ideals_by_hand():
    plain = tiny_model()
    model = BuddyForCausalLM(plain, policy="static:3,1,2,4")
    full, half = plan_conditions(model, (), ("1.0", "3 blocks"))
    # The machine is slower by the round; the medians' ratio would be 4 / 2, the rounds' are 2 3 4.
    times = {full: (2.0, 4.0, 16.0), half: (1.0, 4 / 3, 4.0), None: (4.0, 8.0, 32.0)}
    series = [
        Series(condition, [Sample({"prefill": s, "decode": s}, 1) for s in seconds])
        for condition, seconds in times.items()
    ]
    for own in series[:2]:
        for phase in PHASES:
            own.pieces[phase].append(dict.fromkeys(PIECES, 0.0) | {"blocks": 3.0, "host": 1.0})
    cells = to_results(series, num_blocks=NUM_BLOCKS, batch=1, context=8)["cells"]
    cell = next(c for c in cells if c["blocks"] == 3 and c["phase"] == "decode")
    assert cell["speedup_own_dense"] == pytest.approx(3.0)
    assert cell["speedup_transformers"] == pytest.approx(6.0)
    assert (cell["latency_ms_min"], cell["latency_ms_max"]) == (1000.0, 4000.0)
    # The dense median is 4 s, 3 s of it in 6 blocks: (1 + 6 * 0.5) / (1 + 3 * 0.5).
    assert cell["ideal_speedup"] == pytest.approx(4 / 2.5)
    theirs = next(c for c in cells if c["label"] == "transformers")
    assert theirs["speedup_own_dense"] == pytest.approx(0.5)
    assert theirs["speedup_transformers"] == theirs["ideal_speedup"] == 1.0


def test_a_prompt_at_a_depth_of_its_own_is_no_full_depth_and_has_its_own_cell(
    general, prompts, work
):
    budgets = ("prefill:3 blocks,decode:6 blocks", "prefill:6 blocks,decode:3 blocks")
    cells = measure(general, prompts, work, budgets=budgets, transformers=False)["cells"]
    depths = [(cell["policy"], cell.get("prefill_blocks"), cell["blocks"]) for cell in cells]
    assert depths == [
        ("full", None, 6),
        ("full", None, 6),
        ("static:3,1,2,4", 3, 3),
        ("static:3,1,2,4", 3, 6),
        ("static:3,1,2,4", 6, 6),
        ("static:3,1,2,4", 6, 3),
    ]
    for cell in cells:
        assert cell["speedup_own_dense"] == pytest.approx(8.5 / (cell["blocks"] + 2.5))
        assert cell["ideal_speedup"] == pytest.approx(cell["speedup_own_dense"])


def test_ideal_speedup_by_hand():
    assert ideal_speedup(15, 30, per_block_s=1.0, outside_s=0.0) == 2.0
    assert ideal_speedup(15, 30, per_block_s=1.0, outside_s=15.0) == 1.5
    assert ideal_speedup(30, 30, per_block_s=0.3, outside_s=7.0) == 1.0


def test_an_interrupt_leaves_nothing_of_the_profiler_behind(model, prompts):
    def stop(done, total):
        if done == 3:  # after a profiled pass
            raise KeyboardInterrupt

    before, config = Backbone.run_block, SpeedConfig(new_tokens=NEW)
    with pytest.raises(KeyboardInterrupt):
        measure_speed(model, plan_conditions(model), prompts, config, on_pass=stop)
    with pytest.raises(KeyboardInterrupt), profiled(HostClock()):
        raise KeyboardInterrupt
    assert Backbone.run_block is before
    assert not model.model._forward_hooks


def test_the_budget_runs_at_every_timed_step_and_is_counted(model, prompts):
    conditions = plan_conditions(model, ("routed", "random"), ("3 blocks",))
    for subject in subjects_of(model, conditions, SpeedConfig(transformers=False)):
        ran = []
        with after_forward(subject.module, lambda out, ran=ran: ran.append(out.executed_blocks)):
            sample = time_once(subject, prompts[0], NEW, HostClock())
        assert len(ran) == 2  # the prefill alone, and that of the generation; its steps are traced
        blocks = subject.series.condition.blocks
        assert all(executed.tolist() == [blocks] * BATCH for executed in ran)
        assert (sample.distinct_plans == 1) == (blocks == NUM_BLOCKS)


def test_a_pass_that_runs_another_depth_is_no_measurement(model, prompts):
    (subject,) = subjects_of(
        model, plan_conditions(model, (), ("3 blocks",)), SpeedConfig(transformers=False)
    )[1:]
    subject.options["budget"] = "4 blocks"
    with pytest.raises(AssertionError):
        time_once(subject, prompts[0], NEW, HostClock())


def test_a_method_that_decides_while_it_runs_is_measured_at_its_mean_depth(prompts):
    model = gated("d-llm")
    conditions = plan_conditions(model, ("d-llm",))
    config = SpeedConfig(new_tokens=NEW, rounds=2)
    results = measure_speed(model, conditions, prompts, config)
    cells = {(cell["policy"], cell["phase"]): cell for cell in results["cells"]}
    assert {name for name, _ in cells} == {None, "full", "d-llm"}
    for phase in PHASES:
        free, dense = cells["d-llm", phase], cells["full", phase]
        assert "mean_blocks" not in dense
        assert dense["speedup_own_dense"] == dense["ideal_speedup"] == 1.0
        assert 2 <= free["mean_blocks"] < NUM_BLOCKS
        assert free["blocks"] == round(free["mean_blocks"])
        assert free["ideal_speedup"] > 1.0
    traces = [DepthTrace(), DepthTrace()]
    for ids, trace in zip(prompts[1:], traces, strict=True):  # the first one warms up
        model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, trace=trace)
    ran = statistics.fmean(trace.decode_blocks_per_token for trace in traces)
    assert cells["d-llm", "decode"]["mean_blocks"] == pytest.approx(ran)


def test_transformers_runs_the_same_weights_for_as_many_tokens():
    plain = tiny_model("qwen2.5")
    # Such settings come with published models; a speed is of plain greedy decode, to the end.
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5}
    plain.generation_config.update(**settings)
    model = BuddyForCausalLM(plain, policy="full")
    ids = random_ids(BATCH, CONTEXT)
    theirs, ours = subjects_of(model, plan_conditions(model), SpeedConfig())
    greedy = ours.generate(ids, NEW)
    plain.generation_config.eos_token_id = int(greedy[0, CONTEXT])
    assert theirs.module is plain
    assert ours.module.model is plain
    out = theirs.generate(ids, NEW)
    assert out.shape == (BATCH, CONTEXT + NEW)
    assert torch.equal(out, greedy)
    assert torch.equal(ours.generate(ids, NEW), greedy)
    logits = plain(ids).logits[:, -1:]
    assert torch.equal(greedy[:, CONTEXT], logits.argmax(-1)[:, 0])
    torch.testing.assert_close(ours.prefill(ids).logits, logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(theirs.prefill(ids).logits, logits, atol=1e-5, rtol=0)


def test_conditions_take_turns_and_the_first_round_is_not_counted(model, prompts):
    seen = []
    results = measure_speed(
        model,
        plan_conditions(model, (), ("3 blocks",)),
        prompts,
        SpeedConfig(new_tokens=2, rounds=3),
        on_pass=lambda done, total: seen.append((done, total)),
    )
    # Transformers, full depth (asked for or not) and the budget; three rounds and the warm-up.
    assert seen == [(done, 12) for done in range(13)]
    assert {len(made["decode_ms"]) for made in results["rounds"]} == {3}


def test_without_transformers_there_is_nothing_to_compare_with(model, prompts):
    cells = measure(model, prompts, None, transformers=False)["cells"]
    assert {cell["label"] for cell in cells} == {"buddy"}
    assert {cell["speedup_transformers"] for cell in cells} == {None}


def test_nothing_runs_before_lengths_are_checked(model):
    ran = []
    with after_forward(model.model.lm_head, ran.append):
        long = random_ids(1, 61).view(1, 1, 61)
        with pytest.raises(PromptError, match="context holds 64"):
            measure(model, long, None)
        assert ran == []
        measure(model, long[..., :60], None, budgets=("1.0",))  # 60 + 5 - 1 = 64
        assert ran
    with pytest.raises(PromptError, match="new_tokens must be at least 2"):
        SpeedConfig(new_tokens=1)
    with pytest.raises(PolicyError, match="reroute must be"):
        SpeedConfig(reroute=0)


def test_the_callers_model_is_left_as_it_was(model, prompts):
    policy, spec = model.policy, model.policy_spec
    measure(model, prompts, None)
    assert model.policy is policy
    assert model.policy_spec == spec
    assert not model._forward_hooks
    assert not model.model._forward_hooks
