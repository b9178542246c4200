"""The arithmetic of scaling out, worked by hand, and what a simulation of replicas must keep."""

import copy
import json
import random
import statistics
import sys
from pathlib import Path

import pytest

from buddy.depth.cost import ModelShape
from buddy.records import read_record
from buddy.serving.control.protocol import StepShape

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"
PAGES = ROOT / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """The two scripts as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))  # as `python benchmarks/NAME.py` does
        import balancing
        import scaling

        yield scaling, balancing
        for name in ("balancing", "scaling"):
            del sys.modules[name]


def tables(said):
    """The tables that were printed, each with its title."""
    return [f"**{table.strip()}" for table in said.split("\n**")[1:]]


def test_the_page_and_the_record_have_what_the_script_computes(scripts, capsys):
    scaling, _ = scripts
    found = scaling.compute()
    record = read_record(ROOT / "results" / "scaling" / "arithmetic.json")
    assert json.loads(json.dumps(found)) == record["results"]
    page, made = (PAGES / "scaling.md").read_text(), tables(capsys.readouterr().out)
    assert len(made) == 7
    for item in made:
        assert item in page


def test_the_page_has_what_the_record_of_the_simulation_says(scripts, capsys):
    _, balancing = scripts
    record = read_record(ROOT / "results" / "scaling" / "balancing.json")
    for name in balancing.CASES:
        balancing.show(name, record["results"][name])
    balancing.show_checked(record["results"]["checked"])
    made = tables(capsys.readouterr().out)
    page = "".join((PAGES / f"{name}.md").read_text() for name in ("balancing", "scaling"))
    assert len(made) == 5
    for item in made:
        assert item in page


TINY = ModelShape(
    num_blocks=4,
    block_params=100,
    outside_params=60,
    head_params=50,
    query_width=10,
    kv_width=5,
    bytes_per_param=2.0,
    bytes_per_kv=2.0,
)


def machine(scaling, **more):
    fields = {"read_bytes_per_s": 1000.0, "flops_per_s": 1e4, "step_s": 0.5}
    return scaling.Machine(**fields | more)


def test_a_step_is_what_its_bytes_and_flops_take_by_hand(scripts):
    scaling, _ = scripts
    # Two rows of 4 and 2 blocks that look at 10 and 20 tokens: 6 lane-blocks, 80 block-contexts.
    step = StepShape.of_rows([4, 2], [10, 20])
    parts = scaling.step_parts(step, TINY, machine(scaling))
    assert parts.linear == pytest.approx(4 * 100 * 2 / 1000)  # above 6 x 200 / 1e4
    assert parts.attention == pytest.approx(80 * 2 * 5 * 2 / 1000)  # above 80 x 40 / 1e4
    assert parts.head == pytest.approx(50 * 2 / 1000)
    assert parts.total == pytest.approx(0.5 + 0.8 + 1.6 + 0.1)
    # Two ranks halve each; two all-reduces a block: 6 lanes of 10 numbers, half of them sent twice.
    linked = machine(scaling, link_bytes_per_s=1000.0, reduce_s=0.01)
    parts = scaling.step_parts(step, TINY, linked, ranks=2)
    assert parts.reduce == pytest.approx(2 * (4 * 0.01 + 6 * 10 * 2 * 2 * 0.5 / 1000))
    assert parts.total == pytest.approx(0.5 + 0.4 + 0.8 + 0.05 + 0.32)


def test_a_prompt_computes_where_an_answer_reads(scripts):
    scaling, _ = scripts
    step = StepShape(union=2, prompt_lanes=100, prompt_blocks=200)
    parts = scaling.step_parts(step, TINY, machine(scaling))
    assert parts.linear == pytest.approx(200 * 200 / 1e4)  # above 2 x 200 / 1000
    assert parts.attention == pytest.approx(200 * 50 * 40 / 1e4)
    assert parts.head == pytest.approx(0.1)  # of the last token alone


def test_the_models_have_the_parameters_that_they_are_known_by(scripts):
    scaling, _ = scripts
    for name, known in {
        "Llama-3-8B": 8_030_261_248,
        "Llama-3-70B": 70_553_706_496,
        "SmolLM2-135M": 134_515_008,
    }.items():
        model = scaling.MODELS[name]
        assert model.num_blocks * model.block_params + model.outside_params == known


def test_independent_plans_read_what_drawn_ones_read(scripts):
    scaling, _ = scripts
    draw, depths = random.Random(0), [5, 5, 8, 10]
    drawn = [
        len({0, 11}.union(*(draw.sample(range(1, 11), depth - 2) for depth in depths)))
        for _ in range(4000)
    ]
    found = scaling.union_of_independent(depths, 12)
    assert found == pytest.approx(statistics.mean(drawn), abs=0.05)  # 5 standard errors
    assert scaling.union_of_independent([7], 12) == pytest.approx(7)


def test_the_batch_that_is_in_time_fits_and_a_larger_one_does_not(scripts):
    scaling, _ = scripts
    model = scaling.MODELS["Llama-3-8B"]
    rows, seconds = scaling.batch_in_time(model, 1, (0.5, 1.0), 0.02)
    assert seconds <= 0.02
    context = scaling.PROMPT + scaling.ANSWER // 2
    more = scaling.decode(model, [16, 32] * (rows // 2 + 1), context)
    assert scaling.step_parts(more, model, scaling.H100).total > 0.02
    many, _ = scaling.batch_in_time(model, 1, (1.0,), 1e9)  # memory decides
    each = (scaling.PROMPT + scaling.ANSWER) * 131_072
    assert many == (72e9 - 2 * 8_030_261_248) // each


def served(balancing, todo, policy, **more):
    done = copy.deepcopy(todo)
    fields = {"seconds": seconds, "num_replicas": 4, "num_blocks": 8}
    return done, balancing.simulate(done, policy, **fields | more)


def seconds(shape):
    """A step of a machine that reads slowly."""
    return 1e-3 + 1e-3 * shape.union + 1e-5 * (shape.row_blocks + shape.prompt_blocks)


def told(done):
    return [(item.first_s, item.last_s) for item in done]


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("policy", ["random", "shortest", "classes", "marginal"])
def test_work_is_conserved_and_the_same_seed_gives_the_same(scripts, policy, is_nested):
    _, balancing = scripts
    assert policy in balancing.POLICIES
    todo = balancing.requests(60.0, 3.0, 8, seed=1)
    assert len({item.depth for item in todo}) == 3
    done, replicas = served(balancing, todo, policy, is_nested=is_nested)
    again, _ = served(balancing, todo, policy, is_nested=is_nested)
    assert told(done) == told(again)
    for item in done:
        assert item.fed == item.prompt
        assert item.at_s < item.first_s < item.last_s
        # No token comes sooner than a step of its own depth.
        assert item.itl_s >= 1e-3 + 1e-3 * item.depth
    ran = sum(replica.row_blocks_done for replica in replicas)
    assert ran == sum(item.depth * (item.tokens - 1) for item in done)
    for replica in replicas:
        assert replica.load == replica.block_context == replica.decoding.total() == 0
        assert replica.busy_s <= max(each.last_s for each in done)
    assert balancing.requests(60.0, 3.0, 8, seed=2)[0].at_s != todo[0].at_s


def test_with_one_replica_the_policies_are_equal(scripts):
    _, balancing = scripts
    todo = balancing.requests(30.0, 2.0, 8, seed=3)
    found = [told(served(balancing, todo, item, num_replicas=1)[0]) for item in balancing.POLICIES]
    assert found[1:] == found[:1] * 3


def test_one_request_alone_takes_what_its_steps_take_by_hand(scripts):
    _, balancing = scripts
    request = balancing.Request(at_s=2.0, prompt=600, tokens=3, depth=4)
    balancing.simulate([request], "random", seconds=seconds, num_replicas=1, num_blocks=8)
    # Two steps feed 512 and 88 tokens; the second makes the first token, and two more follow.
    assert request.first_s == pytest.approx(2.0 + 2 * 5e-3 + 1e-5 * 4 * 600)
    assert request.last_s == pytest.approx(request.first_s + 2 * (5e-3 + 4e-5))


def test_shallow_answers_are_faster_among_their_own_where_plans_are_nested(scripts):
    _, balancing = scripts
    todo = balancing.requests(60.0, 3.0, 8, seed=4)

    def shallow(policy, is_nested):
        done, _ = served(balancing, todo, policy, is_nested=is_nested)
        return statistics.mean(item.itl_s for item in done if item.depth == 4)

    assert shallow("classes", True) < 0.8 * shallow("random", True)
    assert shallow("classes", True) < 0.8 * shallow("classes", False)
