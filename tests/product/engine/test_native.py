"""The native decoder against the general path and the naive reference."""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from transformers import LlamaConfig, MistralConfig

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import GROUP, QuantisedLinear, quantise_backbone
from buddy.budget.source import ConstantBudget
from buddy.engine.executors.native import decoder
from buddy.engine.executors.native.decoder import MOST_LOGITS, NativeDecoder
from buddy.engine.feed import Feed
from buddy.engine.naive import naive_decode
from buddy.engine.run import run_step
from buddy.engine.step import Step, logits_of
from buddy.errors import ModelError, PromptError
from tests.product.engine.decoding import decode
from tests.tiny import (
    PECULIAR_FAMILY_NAMES,
    every_family,
    every_kv_policy,
    padded,
    random_ids,
    random_router,
    tiny_buddy,
    tiny_model,
)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")

# atol: other orders of sums, and another exponential.
TOLERANCE = {"atol": 5e-5, "rtol": 1e-4}


def twins(family="llama", **options):
    """One model twice: the native decoder, and the general path."""
    model = tiny_model(family)
    router = random_router(model, summary="ema", ema_decay=0.5)
    make = {"router": router, **options}
    native = BuddyForCausalLM(model, engine="native", **make)
    return native, BuddyForCausalLM(model, engine="general", **make)


@pytest.mark.parametrize("family", PECULIAR_FAMILY_NAMES)
def test_a_family_that_the_kernel_does_not_know_is_refused(family):
    with pytest.raises(ModelError, match="is none of llama, mistral, qwen2, qwen3"):
        BuddyForCausalLM(tiny_model(family), engine="native").executor.fast_path()
    buddy = BuddyForCausalLM(tiny_model(family))
    assert buddy.executor.fast_path() is None
    assert "is none of" in buddy.executor.why_general


@every_family
@every_kv_policy
@torch.no_grad()
def test_it_equals_the_naive_reference_under_changing_plans(family, kv_policy):
    native, _ = twins(family, kv_policy=kv_policy)
    ids, continuation = random_ids(1, 8), random_ids(1, 10, seed=5)
    logits, plans, _ = decode(native, ids, torch.ones_like(ids), continuation, budget="4 blocks")
    expected, expected_plans = naive_decode(
        native.backbone,
        native.policy,
        torch.cat([ids, continuation], 1)[0],
        8,
        blocks=4,
        kv_policy=kv_policy,
    )
    assert torch.equal(plans[0], expected_plans[1:])
    assert len({tuple(plan.tolist()) for plan in plans[0]}) > 1
    assert_close(logits[0], expected[1:], **TOLERANCE)


@every_family
@every_kv_policy
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_mixed_budgets_equals_the_general_path(family, kv_policy, side):
    native, general = twins(family, kv_policy=kv_policy)
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], side)
    continuation = random_ids(3, 8, seed=5)
    options = {"budget": ["3 blocks", "4 blocks", 1.0]}
    made, plans, _ = decode(native, ids, mask, continuation, **options)
    expected, expected_plans, _ = decode(general, ids, mask, continuation, **options)
    assert torch.equal(plans, expected_plans)
    assert_close(made, expected, **TOLERANCE)


@every_kv_policy
def test_several_tokens_at_once_equal_the_general_path(kv_policy):
    native, general = twins(policy="static:1,3", kv_policy=kv_policy)
    ids = random_ids(2, 14)
    made = []
    for buddy in (native, general):
        with torch.no_grad():
            out = buddy(ids[:, :5], budget="4 blocks")
            for part in (ids[:, 5:8], ids[:, 8:12], ids[:, 12:]):
                out = buddy(part, budget="4 blocks", cache=out.cache)
        made.append(out.logits)
    assert_close(made[0], made[1], **TOLERANCE)


def kernel_runs_prompts(monkeypatch):
    """Wherever torch is the faster, too."""
    monkeypatch.setattr(NativeDecoder, "most_lanes", decoder.ANY_NUMBER)


@every_family
@every_kv_policy
@torch.no_grad()
def test_prompts_in_the_kernel_equal_the_general_path(monkeypatch, family, kv_policy):
    kernel_runs_prompts(monkeypatch)
    twins_of = twins(family, kv_policy=kv_policy)
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (33, 9, 21)], "left")
    more = random_ids(3, 17, seed=5)
    made = []
    for buddy in twins_of:
        first = buddy(ids, mask, budget=["3 blocks", "4 blocks", 1.0])
        columns = torch.cat([mask, torch.ones_like(more)], 1)
        second = buddy(
            more, columns, budget=["5 blocks", "3 blocks", "4 blocks"], cache=first.cache
        )
        assert not torch.equal(first.plan.mask, second.plan.mask)
        made.append((first.logits[mask.bool()], second.logits))
    for found, expected in zip(*made, strict=True):
        assert_close(found, expected, **TOLERANCE)


@every_kv_policy
@torch.no_grad()
def test_a_prompt_that_runs_in_parts_equals_the_general_path(monkeypatch, kv_policy):
    kernel_runs_prompts(monkeypatch)
    monkeypatch.setattr(decoder, "MOST_OF_A_STEP", 100)
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (50, 9, 40, 61)], "left")
    assert [len(part) for part in decoder.parts_of(160)] == [128, 32]  # within the last row
    made = []
    for buddy in twins("llama", kv_policy=kv_policy):
        out = buddy(ids, mask, budget=["3 blocks", "4 blocks", 1.0, "3 blocks"])
        assert out.lanes.engine == buddy.executor.name
        more = torch.cat([mask, torch.ones(4, 1, dtype=mask.dtype)], 1)
        later = buddy(ids[:, -1:], more, budget="4 blocks", cache=out.cache)
        made.append((out.logits[mask.bool()], later.logits, out.executed_blocks))
    for found, expected in zip(*made, strict=True):
        assert_close(found, expected, **TOLERANCE)


def test_parts_of_a_pass_are_of_about_as_many_tokens_each():
    for lanes in (1, 63, 4096, 4097, 8192, 8193, 100_000):
        parts = decoder.parts_of(lanes)
        assert [place for part in parts for place in part] == list(range(lanes))
        assert max(map(len, parts)) <= decoder.MOST_OF_A_STEP
        assert len(parts[-1]) > len(parts[0]) - 64 * len(parts)


@pytest.mark.parametrize("rows", [2, 5])
@torch.no_grad()
def test_prompts_of_any_sizes_equal_the_general_path(monkeypatch, rows):
    kernel_runs_prompts(monkeypatch)
    # Six heads to a key head, heads of 40 columns, and more tokens than a product takes at once,
    # and than are normalised at once.
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 40, "hidden_size": 36}
    like = tiny_model("llama")
    torch.manual_seed(0)
    config = {**like.config.to_dict(), **sizes, "max_position_embeddings": 256}
    model = type(like)(LlamaConfig(**config)).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    options = {"policy": "static:1,3"}
    native, general = (
        BuddyForCausalLM(model, engine=engine, **options) for engine in ("native", "general")
    )
    ids, budget = random_ids(rows, 250), ["4 blocks", "5 blocks", *[1.0] * (rows - 2)]
    made, expected = (buddy(ids, budget=budget, use_cache=True) for buddy in (native, general))
    assert_close(made.logits, expected.logits, **TOLERANCE)


@every_kv_policy
def test_a_session_may_change_engines_at_any_step(kv_policy):
    native, general = twins(kv_policy=kv_policy)
    ids, continuation = random_ids(2, 6), random_ids(2, 12, seed=3)
    mask = torch.ones_like(ids)
    options = {"budget": ["3 blocks", "5 blocks"]}
    expected, _, _ = decode(general, ids, mask, continuation, **options)
    with torch.no_grad():
        out = general(ids, **options)
        for step in range(12):
            buddy = (native, general)[step % 3 == 0]
            out = buddy(continuation[:, step : step + 1], cache=out.cache, **options)
            assert_close(out.logits[:, 0], expected[:, step], **TOLERANCE)


def test_rows_may_be_chosen_anew_as_beam_search_does():
    native, general = twins()
    ids = random_ids(1, 6)
    options = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False, "budget": "4 blocks"}
    tokens = [buddy.generate(ids, **options) for buddy in (native, general)]
    assert torch.equal(tokens[0], tokens[1])


def test_more_holes_than_one_projection_takes():
    native, general = twins()
    ids, continuation = random_ids(2, 40), random_ids(2, 6, seed=2)
    mask = torch.ones_like(ids)
    made, plans, _ = decode(native, ids, mask, continuation, budget="3 blocks")
    expected, _, _ = decode(general, ids, mask, continuation, budget="3 blocks")
    assert len({tuple(plan.tolist()) for plan in plans.flatten(0, 1)}) > 1
    assert_close(made, expected, **TOLERANCE)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(threads):
    from buddy.engine.executors.native.decoder import NativeDecoder

    native, general = twins()
    native.executor.fast_path()
    native.executor._made = NativeDecoder(native.backbone, threads)
    ids, continuation = random_ids(3, 6), random_ids(3, 5, seed=2)
    options = {"budget": ["3 blocks", "4 blocks", 1.0]}
    made, _, _ = decode(native, ids, torch.ones_like(ids), continuation, **options)
    expected, _, _ = decode(general, ids, torch.ones_like(ids), continuation, **options)
    assert_close(made, expected, **TOLERANCE)


@every_family
def test_bfloat16_is_as_near_to_float32_as_the_general_path_is(family):
    native, general = twins(family, policy="static:1,3")
    ids, continuation = random_ids(2, 6), random_ids(2, 8, seed=2)
    options = {"budget": "4 blocks"}
    exact, _, _ = decode(general, ids, torch.ones_like(ids), continuation, **options)
    for buddy in (native, general):
        buddy.model.to(torch.bfloat16)
    made, _, _ = decode(native, ids, torch.ones_like(ids), continuation, **options)
    rounded, _, _ = decode(general, ids, torch.ones_like(ids), continuation, **options)
    assert native.executor.fast_path() is not None
    allowed = 1.5 * (rounded.float() - exact).abs().max()
    assert (made.float() - exact).abs().max() <= allowed


def wide_twins(dtype, window=None, **options):
    """Models like `twins`, of sizes where the kernel takes 32 columns and some heads at once."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "sliding_window": window}
    sizes["max_position_embeddings"] = 320
    like = tiny_model("mistral")
    model = type(like)(MistralConfig(**{**like.config.to_dict(), **sizes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that what is attended to shows
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    model.to(dtype)
    return (BuddyForCausalLM(model, engine=engine, **options) for engine in ("native", "general"))


@every_kv_policy
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_heads_that_are_attended_at_once_are_as_near_to_float32(rows, kv_policy):
    options = {"policy": "static:1,3", "kv_policy": kv_policy}
    native, general = wide_twins(torch.bfloat16, **options)
    _, exact = wide_twins(torch.float32, **options)
    ids, continuation = random_ids(rows, 20), random_ids(rows, 8, seed=2)
    results = [
        decode(buddy, ids, torch.ones_like(ids), continuation, budget="4 blocks")[0].float()
        for buddy in (exact, general, native)
    ]
    rounded, made = ((logits - results[0]).abs().max() for logits in results[1:])
    assert 0 < made <= 1.5 * rounded


LONG = 3 * 128 - 100  # more slots than are attended at once, and a part that is not full


@every_kv_policy
@pytest.mark.parametrize("window", [None, 140])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_context_is_as_near_to_float32(rows, window, dtype, kv_policy):
    options = {"policy": "static:1,3", "kv_policy": kv_policy, "window": window}
    native, general = wide_twins(dtype, **options)
    exact = general if dtype == torch.float32 else list(wide_twins(torch.float32, **options))[1]
    arguments = random_ids(rows, LONG), torch.ones(rows, LONG), random_ids(rows, 3, seed=2)
    expected, rounded, made = (
        decode(buddy, *arguments, budget="4 blocks")[0].float()
        for buddy in (exact, general, native)
    )
    if dtype == torch.float32:
        assert_close(made, expected, **TOLERANCE)
    else:
        assert 0 < (made - expected).abs().max() <= 1.5 * (rounded - expected).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_a_long_context_depend_on_neither_threads_nor_company(dtype):
    native, _ = wide_twins(dtype, policy="static:1,3")
    native.executor.fast_path()
    ids, continuation = random_ids(9, LONG), random_ids(9, 3, seed=2)
    found = []
    for threads, rows in ((1, 1), (2, 1), (3, 1), (3, 2), (2, 9)):
        native.executor._made = NativeDecoder(native.backbone, threads)
        mask = torch.ones(rows, LONG)
        logits, _, _ = decode(native, ids[:rows], mask, continuation[:rows], budget="4 blocks")
        found.append(logits[0])
    for logits in found[1:]:
        assert torch.equal(logits, found[0])


@every_kv_policy
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", [(16,), (15, 3), (40, 1, 17), (60, 45)])
def test_prompts_are_as_near_to_float32(lengths, window, kv_policy):
    options = {"policy": "static:1,3", "kv_policy": kv_policy, "window": window}
    ids, mask = padded([random_ids(1, length, seed=length)[0] for length in lengths], "left")
    budget = ["4 blocks", 1.0, "5 blocks"][: len(lengths)]
    results = []
    for dtype, place in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 0)):
        buddy = list(wide_twins(dtype, **options))[place]
        continuation = random_ids(len(lengths), 3, seed=2)
        with torch.no_grad():
            prompt = buddy(ids, mask, budget=budget).logits
        decoded, _, _ = decode(buddy, ids, mask, continuation, budget=budget)
        kept = torch.cat([prompt[mask.bool()], decoded.flatten(0, 1)])
        results.append(kept.float())
    rounded, made = ((logits - results[0]).abs().max() for logits in results[1:])
    assert 0 < made <= 1.5 * rounded


def test_a_lanes_numbers_do_not_depend_on_those_beside_it():
    native, _ = wide_twins(torch.bfloat16, policy="static:1,3,4")
    ids = random_ids(1, 20).repeat(5, 1)
    logits = []
    # Beside others in every block, and alone in three of them; as many blocks itself.
    for budgets, seed in (([1.0] * 5, 2), ([1.0] + ["3 blocks"] * 4, 3)):
        continuation = random_ids(5, 6, seed=seed)
        continuation[0] = random_ids(1, 6, seed=9)[0]
        with torch.no_grad():
            out = native(ids, budget=1.0)
            for step in range(6):
                out = native(
                    continuation[:, step : step + 1],
                    cache=out.cache,
                    budget=budgets,
                )
                logits.append(out.logits[:, 0])
    first, second = torch.stack(logits[:6], 1), torch.stack(logits[6:], 1)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("quantisation", [None, "int8", "int4"])
@torch.no_grad()
def test_a_lanes_numbers_do_not_depend_on_how_many_there_are(quantisation):
    native, _ = wide_twins(torch.bfloat16, policy="static:1,3,4")
    if quantisation is not None:
        quantise_backbone(native.backbone, quantisation)
    if not native.executor.fast_path().steady_lanes:
        pytest.skip("tiles read 4 bits as bfloat16, which few lanes do not meet")
    ids, continuation = random_ids(32, 6), random_ids(32, 4, seed=2)
    budgets = [1.0] + ["3 blocks"] * 31  # the first alone in some blocks
    found = [
        decode(native, ids[:rows], torch.ones(rows, 6), continuation[:rows], budget=budgets[:rows])
        for rows in (1, 2, 3, 9, 20, 32)
    ]
    for logits, _, _ in found[1:]:
        assert torch.equal(logits[0], found[0][0][0])


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2.5"])  # the second has tied embeddings
def test_quantised_weights_give_the_general_paths_logits(family, quantisation, rows):
    native, general = twins(family, policy="static:1,3")
    ids, continuation = random_ids(rows, 6), random_ids(rows, 5, seed=2)
    arguments = (ids, torch.ones_like(ids), continuation)
    plain, _, _ = decode(general, *arguments, budget=1.0)
    quantise_backbone(native.backbone, quantisation)
    general.backbone.head = native.backbone.head
    general.backbone.embedding = native.backbone.embedding
    made, _, _ = decode(native, *arguments, budget=1.0)
    expected, _, _ = decode(general, *arguments, budget=1.0)
    assert_close(made, expected, **TOLERANCE)
    assert (made - plain).abs().max() > 1e-3


def plainly(linear, quantisation):
    """Nothing: a layer has no numbers of its own in a file."""


def by_groups(linear, quantisation):
    """A layer of whole groups in int8, with scales that are no numbers of bfloat16."""
    if linear.in_features % GROUP:
        return None
    groups = linear.weight.detach().float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 127).half().float()
    values = (groups / scales[..., None]).round().to(torch.int8)
    return QuantisedLinear(values.flatten(1), scales, None, linear.bias)


@pytest.mark.parametrize("stored", [plainly, by_groups])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("llama3", torch.bfloat16)]
)
@torch.no_grad()
def test_what_is_embedded_is_the_general_paths_bit_for_bit(family, dtype, stored):
    buddy = BuddyForCausalLM(tiny_model(family).to(dtype), engine="native", policy="full")
    quantise_backbone(buddy.backbone, "int8", stored=stored)
    session, ids = buddy.new_session(1, 97), torch.arange(97)
    session.join(ConstantBudget(6))
    lanes = session.begin(tuple(session.sequences.values()), (97,))
    run = buddy.executor.fast_path().begin(session, lanes, Feed(token_ids=ids, counts=(97,)))
    run.blocks(range(0), None)
    assert torch.equal(run.hidden, buddy.backbone.embed(ids[None])[0].float())


@pytest.mark.parametrize(("rows", "tokens"), [(1, 290), (2, 3), (3, 7), (20, 9)])
@pytest.mark.parametrize("stored", [plainly, by_groups])
def test_weights_of_8_bits_are_as_near_to_float32(rows, tokens, stored):
    native, general = wide_twins(torch.bfloat16, policy="static:1,3")
    _, exact = wide_twins(torch.float32, policy="static:1,3")
    for buddy in (exact, general, native):
        for weight in buddy.model.parameters():
            weight.data = weight.bfloat16().to(weight.dtype)
        quantise_backbone(buddy.backbone, "int8", stored=stored)
    ids, continuation = random_ids(rows, tokens), random_ids(rows, 6, seed=2)
    made, rounded, found = (
        decode(buddy, ids, torch.ones_like(ids), continuation, budget="4 blocks")[0].float()
        for buddy in (exact, general, native)
    )
    # Tiles round lanes to bfloat16 as the general path does: neither is the nearer for certain.
    most = 1.05 if native.executor.fast_path()._weights.model.by_tiles else 1
    assert 0 < (found - made).norm() <= most * (rounded - made).norm()


@pytest.mark.parametrize("quantisation", [None, "int8", "int4"])
@torch.no_grad()
def test_logits_of_some_residuals_are_the_general_paths_whatever_their_number(quantisation):
    buddy = BuddyForCausalLM(tiny_model(), engine="native")
    if quantisation is not None:
        quantise_backbone(buddy.backbone, quantisation)
    executor = buddy.executor.fast_path()
    for shape in ((32,), (3, 32), (2, 16, 32)):
        hidden = torch.randn(shape)
        assert_close(executor.logits(hidden), buddy.backbone.logits(hidden), **TOLERANCE)
    many = torch.randn(MOST_LOGITS, 32)
    if executor.steady_lanes:
        few = torch.cat([executor.logits(part) for part in many.split(20)])
        assert torch.equal(executor.logits(many), few)
    assert executor.logits(torch.zeros(MOST_LOGITS + 1, 32)) is None


@pytest.mark.parametrize("num_logits", [1, 20, 37])
@pytest.mark.parametrize("engine", ["native", "general"])
@torch.no_grad()
def test_logits_of_the_first_words_alone_are_a_part_of_all(engine, num_logits):
    buddy, whole = BuddyForCausalLM(tiny_model(), engine=engine), []
    session = buddy.new_session(2, 8)
    numbers = [session.join(ConstantBudget(6)) for _ in range(2)]
    executor = buddy.executor.fast_path()
    feed = Feed(token_ids=random_ids(1, 4)[0], counts=(2, 2))
    run_step(buddy.backbone, buddy.policy, session, Step(sequence_ids=numbers, feed=feed))
    before = session.state
    for asked in (None, num_logits):
        out = run_step(
            buddy.backbone,
            buddy.policy,
            session,
            Step(sequence_ids=numbers, feed=feed, num_logits=asked),
            executor=executor,
        )
        assert (out.logits is None) == (engine == "general")
        whole.append(logits_of(buddy.backbone, out, executor, num_logits=asked))
        session.rewind(before)
    assert whole[1].shape == (4, num_logits)
    assert torch.equal(whole[0][:, :num_logits], whole[1])


@torch.no_grad()
def test_a_prompt_that_the_kernel_ran_gets_its_logits_there(monkeypatch):
    wide, general = wide_twins(torch.bfloat16)
    executor = wide.executor.fast_path()
    if executor.most_lanes < 50:
        pytest.skip("torch multiplies prompts faster on this processor")
    exact, _ = wide_twins(torch.float32)
    ids = random_ids(1, 50)
    expected = exact(ids, logits_to_keep=1, use_cache=True).logits
    error = (general(ids, logits_to_keep=1, use_cache=True).logits - expected).norm()
    monkeypatch.setattr(wide.backbone, "logits", None)
    found = wide(ids, logits_to_keep=1, use_cache=True).logits
    assert (found - expected).norm() < 1.2 * error


def test_it_copies_no_weights():
    native, _ = twins()
    decoder = native.executor.fast_path()
    weights = decoder._weights.model
    assert weights.vocabulary.weights == native.backbone.head.weight.data_ptr()
    first = native.backbone.blocks[0].mlp.gate_proj.weight
    assert weights.blocks[0].gate.weights == first.data_ptr()


def test_weights_that_change_or_move_are_followed():
    native, general = twins(policy="full")
    ids = random_ids(1, 4)
    arguments = (ids, torch.ones_like(ids), random_ids(1, 3, seed=1))
    before, _, _ = decode(native, *arguments)
    for parameter in native.model.parameters():
        parameter.data = parameter.data * 1.1
    after, _, _ = decode(native, *arguments)
    expected, _, _ = decode(general, *arguments)
    assert_close(after, expected, **TOLERANCE)
    assert (after - before).abs().max() > 1e-3


def test_a_model_that_moves_keeps_the_angles_that_a_longer_session_reads():
    native, _ = twins(policy="full")
    weights = native.executor.fast_path()._weights
    weights.refresh(60)
    for parameter in native.model.parameters():
        parameter.data = parameter.data.clone()
    weights.refresh(8)
    assert len(weights._angles[0]) == 60


@pytest.mark.parametrize(
    ("family", "quantisation"), [("llama", None), ("llama", "int8"), ("llama3", "int8")]
)
def test_memory_that_the_kernel_reads_outlives_a_weight_that_moves(family, quantisation):
    native, general = twins(family, policy="full")
    if quantisation is not None:
        quantise_backbone(native.backbone, quantisation)
        general.backbone.head = native.backbone.head
        general.backbone.embedding = native.backbone.embedding
    ids = random_ids(1, 4)
    arguments = (ids, torch.ones_like(ids), random_ids(1, 3, seed=1))
    before, _, _ = decode(native, *arguments)
    parts = (native.backbone.blocks, native.backbone.head)
    buffers = [buffer for part in parts for buffer in part.buffers()]
    weights = [*native.model.parameters(), *buffers]
    read = [StorageWeakRef(weight.untyped_storage()) for weight in weights]
    for weight in weights:
        weight.data = -weight.data
    gc.collect()
    assert not any(storage.expired() for storage in read)
    after, _, _ = decode(native, *arguments)
    gc.collect()
    assert all(storage.expired() for storage in read)
    expected, _, _ = decode(general, *arguments)
    assert_close(after, expected, **TOLERANCE)
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["embed_tokens", "layers.2.mlp.up_proj", "layers.3.input", "norm"])
@torch.no_grad()
def test_any_weight_that_moves_is_followed_by_the_next_session(name):
    native, general = twins("qwen3", policy="full")
    ids, new = random_ids(1, 4), random_ids(1, 1, seed=1)
    out, expected = native(ids), general(ids)
    out = native(new, cache=out.cache)
    expected = general(new, cache=expected.cache)
    stale = out.logits
    [weight] = [t for at, t in native.model.model.named_parameters() if at.startswith(name)]
    weight.data = weight.data * 1.5
    out, expected = native(ids), general(ids)
    out = native(new, cache=out.cache)
    expected = general(new, cache=expected.cache)
    assert_close(out.logits, expected.logits, **TOLERANCE)
    assert (out.logits - stale).abs().max() > 1e-3


@torch.no_grad()
def test_weights_that_change_their_format_between_two_steps_are_refused():
    native, _ = twins(policy="full")
    new = random_ids(1, 1, seed=1)
    session = native(random_ids(1, 4)).cache
    native(new, cache=session)
    native.model.to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"float32 .*bfloat16.*begin a new session"):
        native(new, cache=session)
    native.model.to(torch.float16)
    with pytest.raises(ModelError, match="float16"):
        native(new, cache=session)


def test_passes_without_a_session_ask_nothing_of_the_kernel(monkeypatch):
    native, _ = twins()
    asked = []
    monkeypatch.setattr(native.executor, "refresh", lambda: asked.append(1))
    ids = random_ids(1, 4)
    native(ids, budget="4 blocks")
    with torch.no_grad():
        native(ids, budget="4 blocks", use_cache=False)
        assert asked == []
        native(ids, budget="4 blocks")
    assert asked


def test_gradients_take_the_general_path():
    native, _ = twins(policy="full")
    ids = random_ids(1, 4)
    with torch.no_grad():
        session = native(ids).cache
    out = native(random_ids(1, 1, seed=1), cache=session)
    assert out.logits.requires_grad


def test_what_it_cannot_run_is_said():
    model = tiny_model()
    block = model.model.layers[1]
    block.mlp.up_proj = nn.Sequential(block.mlp.up_proj)
    buddy = BuddyForCausalLM(model, engine="native")
    session = BuddyForCausalLM(model, engine="general")
    ids = random_ids(1, 3)
    with torch.no_grad():
        started = session(ids).cache
        with pytest.raises(ModelError, match="merge the adapter first"):
            buddy(ids[:, :1], cache=started)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("CC", "no-such-compiler", "no C compiler"),
        ("BUDDY_NATIVE", "0", "BUDDY_NATIVE=0"),
        ("CC", "false", "could not compile the kernel"),
    ],
)
def test_without_the_kernel_the_general_path_runs_and_says_why(
    monkeypatch, tmp_path, variable, value, says
):
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path))
    buddy = tiny_buddy()
    tokens = buddy.generate(random_ids(1, 4), max_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 7)
    assert says in buddy.executor.why_general
    with pytest.raises(ModelError, match=says):
        tiny_buddy(engine="native").executor.fast_path()


@torch.no_grad()
def test_token_ids_of_any_kind_are_read_and_foreign_ones_refused():
    native, general = twins()
    ids = random_ids(1, 6)
    made = []
    for buddy in (native, general):
        session = buddy(ids, budget=0.7).cache
        for wrong in (97, -1, 2**40):
            with pytest.raises(PromptError, match=f"token id {wrong} is not one of the model's 97"):
                buddy(torch.tensor([[wrong]]), cache=session)
            with pytest.raises(PromptError, match="one of the model's 97"):
                run_step(
                    buddy.backbone,
                    buddy.policy,
                    session,
                    Step(
                        sequence_ids=list(session.sequences),
                        feed=Feed(token_ids=torch.tensor([wrong]), counts=(1,)),
                    ),
                    executor=buddy.executor.fast_path(),
                )
        made.append(buddy(torch.tensor([[5]], dtype=torch.int32), cache=session).logits)
    assert_close(*made, **TOLERANCE)


@torch.no_grad()
def test_a_new_session_sees_weights_as_they_are():
    model = tiny_model("qwen3")
    buddy = BuddyForCausalLM(model, engine="native")
    general = BuddyForCausalLM(model, engine="general")
    ids, continuation = random_ids(1, 6), random_ids(1, 3, seed=4)
    mask = torch.ones_like(ids)
    decode(buddy, ids, mask, continuation)
    state = {name: t + 0.1 * torch.randn_like(t) for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    made, expected = (decode(twin, ids, mask, continuation)[0] for twin in (buddy, general))
    assert_close(made, expected, **TOLERANCE)
    model.model.layers[2].mlp.up_proj = nn.Sequential(model.model.layers[2].mlp.up_proj)
    buddy = BuddyForCausalLM(model)
    decode(buddy, ids, mask, continuation)
    assert "merge the adapter first" in buddy.executor.why_general
    model.model.layers[2].mlp.up_proj = model.model.layers[2].mlp.up_proj[0]
    decode(buddy, ids, mask, continuation)
    assert buddy.executor.why_general is None or "merge" not in buddy.executor.why_general


@torch.no_grad()
def test_sessions_may_be_stepped_by_several_threads():
    native, general = twins()
    ids, continuation = random_ids(1, 6), random_ids(1, 20, seed=4)
    mask = torch.ones_like(ids)
    expected = decode(general, ids, mask, continuation, budget="4 blocks")[0]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(decode, native, ids, mask, continuation, budget="4 blocks")
            for _ in range(4)
        ]
        for job in jobs:
            assert_close(job.result()[0], expected, **TOLERANCE)
