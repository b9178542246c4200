"""Save and load: what comes back is what was saved, or a clear refusal."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.quantised import quantise_backbone
from buddy.checkpoint.parts import Origin
from buddy.errors import CheckpointError, FamilyError, ModelError, PolicyError
from buddy.policies.static import StaticPolicy
from buddy.records import RunRecord
from buddy.routing.measured_constant import MeasuredConstant
from tests.disks import full_disk
from tests.tiny import random_ids, random_predictor, random_router, tiny_model
from tests.words import word_tokenizer

IDS = random_ids(3, 9)


def logits(model, **options):
    with torch.no_grad():
        out = model(IDS, budget=[0.5, "4 blocks", 1.0], **options)
    return out.logits, out.plan.executed_sets


@pytest.fixture
def routed():
    model = tiny_model("qwen3")
    prior = torch.tensor([0.3, -0.4, 1.2, -1.1])
    return BuddyForCausalLM(
        model, router=random_router(model, prior=prior), prior=prior, kv_policy="mask"
    )


@pytest.fixture
def adapted():
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return BuddyForCausalLM(model.eval(), router=random_router(tiny_model()))


def test_round_trip_with_router_and_prior(routed, tmp_path):
    routed.save_pretrained(tmp_path / "model")
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    before, after = logits(routed), logits(loaded)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert loaded.kv_policy == "mask"
    assert torch.equal(loaded.prior, routed.prior)
    assert len(set(before[1])) > 1


def test_round_trip_with_a_predictor(routed, tmp_path):
    routed.save_pretrained(tmp_path / "old")
    routed.predictor = random_predictor(routed.router, rank=5)
    routed.save_pretrained(tmp_path / "model")
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert loaded.predictor.config.rank == 5
    assert loaded.predictor.down.weight.dtype == torch.float32
    for name, parameter in routed.predictor.named_parameters():
        assert torch.equal(loaded.predictor.get_parameter(name), parameter)
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        before = routed(IDS, budget="auto").executed_blocks.tolist()
        assert loaded(IDS, budget="auto").executed_blocks.tolist() == before
    assert len(set(before)) > 1


CONSTANT = MeasuredConstant(blocks=4, by_kind={"a": 3}, rows=9, gain=0.1, error=0.2)


def test_round_trip_with_what_a_predictor_was_measured_against(routed, tmp_path):
    routed.predictor = random_predictor(routed.router)
    routed.save_pretrained(tmp_path / "unmeasured")
    facts = routed.facts()
    routed.predictor.constant = CONSTANT
    assert routed.facts() == facts
    routed.save_pretrained(tmp_path / "model")
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.predictor.constant == CONSTANT
    loaded.save_pretrained(tmp_path / "again")
    again, unmeasured = (
        json.loads((tmp_path / name / "buddy.json").read_text()) for name in ("again", "unmeasured")
    )
    assert again["constant"]["by_kind"] == {"a": 3}
    assert "constant" not in unmeasured  # older versions read it
    assert BuddyForCausalLM.from_pretrained(tmp_path / "unmeasured").predictor.constant is None


def test_a_checkpoint_older_than_the_predictor_still_loads(routed, tmp_path):
    routed.save_pretrained(tmp_path / "model")
    _manifest(lambda m: m.pop("predictor"))(tmp_path / "model")
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.predictor is None
    assert torch.equal(logits(loaded)[0], logits(routed)[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(router=None), "predictor: it reads what a router reads"),
        (lambda m: m["predictor"].update(rank=9), "the predictor in .* does not fit"),
        (lambda m: m["predictor"].update(extra=1), "predictor has an unknown key extra"),
        (lambda m: m.update(predictor=None), "constant: a predictor was measured against it"),
        (lambda m: m["constant"].update(blocks=7), "constant: it has 7 blocks, and the base .* 6"),
        (lambda m: m["constant"]["by_kind"].update(a=7), "constant: it has 7 blocks"),
        (lambda m: m["constant"]["by_kind"].update(a="x"), "by_kind.a: expected int, got 'x'"),
        (lambda m: m["constant"].update(error=-1.0), "error must be at least 0"),
    ],
)
def test_a_spoilt_predictor_is_refused(routed, tmp_path, change, says):
    routed.predictor = random_predictor(routed.router)
    routed.predictor.constant = CONSTANT
    routed.save_pretrained(tmp_path / "model")
    _manifest(change)(tmp_path / "model")
    with pytest.raises(CheckpointError, match=says):
        BuddyForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("merge", [False, True])
def test_round_trip_with_adapter(adapted, tmp_path, merge):
    plain = BuddyForCausalLM(tiny_model(), router=random_router(tiny_model()))
    adapted.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model/adapter/adapter_model.safetensors").is_file()
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model", merge_adapter=merge)
    # atol: merging adds the product to the weights before, not after, the multiplication.
    torch.testing.assert_close(logits(loaded)[0], logits(adapted)[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(plain)[0], logits(adapted)[0], atol=1e-2)


MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("dtype", "is_plain", "config"),
    [
        *((dtype, True, {}) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
        (torch.bfloat16, True, {"use_rslora": True, "lora_alpha": 3}),
        (
            torch.float32,
            True,
            {"exclude_modules": ["model.layers.0.self_attn.v_proj", "down_proj"]},
        ),
        (torch.float64, False, {"rank_pattern": {"v_proj": 2}}),
        (torch.float32, False, {"layers_to_transform": [1, 3]}),
        (torch.bfloat16, False, {"use_dora": True}),
    ],
)
def test_an_adapter_is_merged_as_peft_merges_it(tmp_path, monkeypatch, dtype, is_plain, config):
    base = tiny_model().to(dtype)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=MATRICES, **config)).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model = BuddyForCausalLM(adapted, policy="full")
    model.save_pretrained(tmp_path / "model")
    live = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    expected = live.model.merge_and_unload().state_dict()
    if is_plain:
        monkeypatch.setattr("buddy.checkpoint.adapter.load_adapter", None)
    made = BuddyForCausalLM.from_pretrained(tmp_path / "model", merge_adapter=True)
    found = made.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert made.origin.merged_adapter == model.facts()["adapter"]
    plain = tiny_model().to(dtype).state_dict()
    assert any(not torch.equal(found[name], plain[name]) for name in found)


@pytest.mark.parametrize("config", [{}, {"rank_pattern": {"q_proj": 2}}])  # merged here, by PEFT
def test_an_adapter_on_a_tied_head_leaves_the_embedding_alone(tmp_path, config):
    base = tiny_model("qwen2.5")
    assert base.lm_head.weight is base.model.embed_tokens.weight
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        adapted = get_peft_model(
            base, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], **config)
        )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model = BuddyForCausalLM(adapted.eval(), policy="full")
    model.save_pretrained(tmp_path / "model")
    merged = BuddyForCausalLM.from_pretrained(tmp_path / "model", merge_adapter=True)
    merged.save_pretrained(tmp_path / "merged")
    again = BuddyForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = model(IDS).logits
        assert_close(merged(IDS).logits, expected, atol=1e-4, rtol=1e-4)  # another order of sums
        assert torch.equal(again(IDS).logits, merged(IDS).logits)
        assert not torch.allclose(tiny_model("qwen2.5")(IDS).logits, expected, atol=0.1)


def test_a_model_says_the_same_of_itself_live_loaded_and_merged(adapted, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    adapted.origin = Origin(
        source=str(tmp_path / "base"), fingerprint=base_fingerprint(adapted.model)
    )
    adapted.save_pretrained(tmp_path / "small")
    facts = adapted.facts()
    assert facts.keys() == {"num_blocks", "base", "adapter", "router"}
    for merge in (False, True):
        loaded = BuddyForCausalLM.from_pretrained(tmp_path / "small", merge_adapter=merge)
        assert loaded.facts() == facts
    with torch.no_grad():
        next(p for n, p in adapted.model.named_parameters() if "lora_B" in n).add_(0.5)
        next(adapted.router.parameters()).add_(0.5)
    changed = adapted.facts()
    assert {name for name in facts if facts[name] != changed[name]} == {"adapter", "router"}


@pytest.mark.parametrize("merge", [False, True])
def test_an_order_of_the_base_serves_the_tuned_model_and_no_other(adapted, tmp_path, merge):
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    adapted.origin = Origin(
        source=str(tmp_path / "base"), fingerprint=base_fingerprint(adapted.model)
    )
    adapted.save_pretrained(tmp_path / "tuned")
    path = tmp_path / "order.json"
    results = {"removal_order": [4, 2]}
    measured = BuddyForCausalLM(base).facts()
    RunRecord(kind="importance-x", config={}, results=results, model=measured).save(path)
    options = {"policy": f"static:{path}", "merge_adapter": merge}
    tuned = BuddyForCausalLM.from_pretrained(tmp_path / "tuned", **options)
    assert tuned.policy.removal_order == (4, 2)
    tiny_model(seed=5).save_pretrained(tmp_path / "other")
    with pytest.raises(PolicyError, match=r"order\.json was measured on another model"):
        BuddyForCausalLM.from_pretrained(tmp_path / "other", policy=f"static:{path}")


def test_a_router_of_another_depth_is_refused_whatever_the_policy():
    deeper = tiny_model().config
    deeper.num_hidden_layers = 8
    router = random_router(SimpleNamespace(config=deeper))
    with pytest.raises(PolicyError, match="router is made for 8 blocks and the model has 6"):
        BuddyForCausalLM(tiny_model(), router=router, policy="full")


def test_an_adapter_names_its_base_and_no_folder_of_this_machine(adapted, tmp_path):
    adapted.origin = Origin(source="smollm2-135m", fingerprint=base_fingerprint(adapted.model))
    adapted.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "smollm2-135m"


def test_an_adapter_is_written_alike_by_every_process(adapted, tmp_path):
    held = adapted.model.peft_config["default"]
    held.target_modules = ["v_proj", "q_proj", "up_proj", "o_proj"]
    held.exclude_modules = ["model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.k_proj"]
    adapted.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/adapter/adapter_config.json").read_text())
    for names in (config["target_modules"], config["exclude_modules"]):
        assert names == sorted(names)


def test_a_merged_adapter_is_not_lost_when_saved_again(adapted, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    adapted.origin = Origin(
        source=str(tmp_path / "base"), fingerprint=base_fingerprint(adapted.model)
    )
    adapted.save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small/backbone").exists()
    merged = BuddyForCausalLM.from_pretrained(tmp_path / "small", merge_adapter=True)
    with pytest.raises(CheckpointError, match="merged or trained"):
        merged.save_pretrained(tmp_path / "again", include_backbone=False)
    merged.save_pretrained(tmp_path / "again")
    again = BuddyForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(again)[0], logits(adapted)[0], atol=1e-4, rtol=1e-4)


def test_an_adapter_that_the_manifest_does_not_name_is_refused(adapted, routed, tmp_path):
    adapted.save_pretrained(tmp_path / "adapted")
    routed.save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "adapted/adapter", tmp_path / "plain/adapter")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not listed"):
        BuddyForCausalLM.from_pretrained(tmp_path / "plain")


def test_a_relative_source_is_found_from_anywhere(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    BuddyForCausalLM.from_pretrained("./base", policy="random").save_pretrained("small")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = BuddyForCausalLM.from_pretrained("../small")
    assert loaded.policy.name == "random"
    mode = (tmp_path / "small").stat().st_mode & 0o777
    assert mode == (tmp_path / "elsewhere").stat().st_mode & 0o777


def test_weights_that_do_not_fill_their_config_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for num_blocks in (8, 5):
        path.write_text(json.dumps({**config, "num_hidden_layers": num_blocks}))
        with pytest.raises(CheckpointError, match=r"do not fit its config\.json"):
            BuddyForCausalLM.from_pretrained(tmp_path)
    for spoilt in ({"hidden_act": "foo"}, {"max_position_embeddings": None}):
        path.write_text(json.dumps({**config, **spoilt}))
        with pytest.raises(CheckpointError, match="describes no model"):
            BuddyForCausalLM.from_pretrained(tmp_path)


def test_saving_onto_a_file_is_refused(routed, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="holds what is no Buddy checkpoint"):
        routed.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_with_a_source_is_saved_without_its_backbone(routed, tmp_path):
    routed.model.save_pretrained(tmp_path / "base")
    base = BuddyForCausalLM.from_pretrained(tmp_path / "base")
    base.router = routed.router
    base.save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small/backbone").exists()
    again = BuddyForCausalLM.from_pretrained(tmp_path / "small", policy="routed")
    assert torch.equal(logits(again)[0], logits(routed)[0])


def test_saving_again_replaces_the_checkpoint_and_nothing_else(routed, tmp_path):
    target = tmp_path / "model"
    routed.save_pretrained(target)
    routed.kv_policy = "zero"
    routed.save_pretrained(target)
    assert BuddyForCausalLM.from_pretrained(target).kv_policy == "zero"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="no Buddy checkpoint"):
        routed.save_pretrained(other)
    assert (other / "chapter.txt").read_text() == "years of work"
    (target / "notes").mkdir()
    (target / "notes" / "what I tried.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"holds 'notes/what I tried.txt' beside a Buddy"):
        routed.save_pretrained(target)
    assert (target / "notes" / "what I tried.txt").read_text() == "years of work"


def test_a_policy_is_kept_by_name_and_refused_as_an_object(routed, tmp_path):
    routed.set_policy("static:1,3")
    routed.save_pretrained(tmp_path / "model")
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.policy.removal_order == (1, 3)
    sets = tmp_path / "sets.json"
    results = {"sets": {"3": [0, 4, 5]}, "removal_order": [4, 1, 2, 3]}
    RunRecord(kind="searched", config={}, results=results, model=routed.facts()).save(sets)
    routed.set_policy(f"searched:{sets}")
    routed.save_pretrained(tmp_path / "searched")
    sets.unlink()
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "searched")
    assert loaded.policy.sets == {3: (0, 4, 5)}
    assert loaded.policy.removal_order == (4, 1, 2, 3)
    routed.set_policy(StaticPolicy([2], 6))
    with pytest.raises(CheckpointError, match="given as an object"):
        routed.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(PolicyError, match="made for 7 blocks and the model has 6"):
        routed.set_policy(StaticPolicy([2], 7))


def test_a_save_that_fails_leaves_the_old_checkpoint(routed, tmp_path, monkeypatch):
    target = tmp_path / "model"
    routed.save_pretrained(target)
    monkeypatch.setattr(
        "safetensors.torch.save_file",
        lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(CheckpointError, match="No space left"):
        routed.save_pretrained(target)
    assert logits(BuddyForCausalLM.from_pretrained(target))[1] == logits(routed)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("has_adapter", [False, True])
def test_wishes_of_makers_that_transformers_would_not_write_are_kept(tmp_path, has_adapter):
    tiny_model().save_pretrained(tmp_path / "base")
    wishes = {"temperature": 0.9, "top_p": 0.6}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(wishes))
    model = BuddyForCausalLM.from_pretrained(tmp_path / "base", policy="random")
    if has_adapter:
        adapted = get_peft_model(model.model, LoraConfig(r=4, target_modules=["q_proj"]))
        model = BuddyForCausalLM(adapted, policy="random")
    model.save_pretrained(tmp_path / "model", include_backbone=True)
    written = json.loads((tmp_path / "model/backbone/generation_config.json").read_text())
    assert wishes.items() <= written.items()
    assert "do_sample" not in written
    again = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    again.save_pretrained(tmp_path / "again", include_backbone=True)
    again.generation_config.top_p = 0.5
    with pytest.raises(CheckpointError, match=r"generation config cannot be written.*top_p"):
        again.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_saved_in_float16_opens_in_every_format(tmp_path, stored):
    tiny_model().to(stored).save_pretrained(tmp_path / "base")
    made = BuddyForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float16)
    made.save_pretrained(tmp_path / "model", tokenizer=word_tokenizer())
    assert (tmp_path / "model/backbone").exists() == (stored is not torch.float16)
    for dtype in (None, torch.float16, torch.bfloat16, torch.float32):
        loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
        expected = made.model.model.layers[3].mlp.up_proj.weight.to(loaded.dtype)
        assert torch.equal(loaded.model.model.layers[3].mlp.up_proj.weight, expected)
    if stored is not torch.float16:
        with pytest.raises(CheckpointError, match="rounded to float16"):
            made.save_pretrained(tmp_path / "model", include_backbone=False)


def test_a_checkpoint_of_other_weights_than_float16_says_what_to_load_it_in(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    BuddyForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "model")
    BuddyForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="float16: load it in bfloat16 or float32"):
        BuddyForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float16)


@pytest.mark.parametrize("is_loaded_so", [True, False])
def test_quantised_weights_do_not_replace_a_checkpoint(routed, tmp_path, is_loaded_so):
    target = tmp_path / "model"
    routed.save_pretrained(target)
    model = BuddyForCausalLM.from_pretrained(target, quant="int8" if is_loaded_so else None)
    base = routed.base_fingerprint
    if not is_loaded_so:
        quantise_backbone(model.backbone, "int8")
    assert model.base_fingerprint == base
    for include in (None, False):
        with pytest.raises(CheckpointError, match="saved so only with include_backbone=True"):
            model.save_pretrained(target, include_backbone=include)
    assert logits(BuddyForCausalLM.from_pretrained(target))[1] == logits(routed)[1]


@pytest.mark.parametrize("num_bytes", [50, 1000, 20_000])
def test_a_full_disk_is_one_line_whichever_file_it_stops(routed, tmp_path, num_bytes):
    target = tmp_path / "model"
    routed.save_pretrained(target)
    with full_disk(num_bytes), pytest.raises(CheckpointError, match="File too large; what was"):
        routed.save_pretrained(target, tokenizer=word_tokenizer())
    assert logits(BuddyForCausalLM.from_pretrained(target))[1] == logits(routed)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_prints_nothing(routed, adapted, tmp_path, capfd):
    routed.save_pretrained(tmp_path / "routed")
    adapted.save_pretrained(tmp_path / "adapted", include_backbone=True)
    assert capfd.readouterr() == ("", "")


def _truncate(folder):
    file = folder / "routing.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _flip(folder):
    file = folder / "routing.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))


def _manifest(change):
    def spoil(folder):
        path = folder / "buddy.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncate, "expected .* bytes"),
        (_flip, "changed or damaged"),
        (lambda folder: (folder / "routing.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "backbone/model.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "buddy.json").write_text("{"), "is no JSON"),
        (lambda folder: (folder / "buddy.json").write_text("[]"), "holds a list"),
        (_manifest(lambda m: m.pop("router")), "lacks router"),
        (_manifest(lambda m: m["base"].pop("source")), "base lacks source"),
        (_manifest(lambda m: m.update(files={"a": None})), r"files\.a: expected a table"),
        (_manifest(lambda m: m.update(kv_policy="keep")), "kv_policy: expected one of"),
        (_manifest(lambda m: m.update(format=99)), "format 99"),
        (_manifest(lambda m: m["base"].update(vocab_size=9)), "another base model: vocab_size"),
        (_manifest(lambda m: m["base"].update(fingerprint="x")), "another base model"),
        (_manifest(lambda m: m["router"].update(num_blocks=9)), "router: it is for 9 blocks"),
        (_manifest(lambda m: m["router"].update(extra=1)), "unknown key extra"),
    ],
)
def test_a_spoilt_checkpoint_is_refused(routed, tmp_path, spoil, says):
    routed.save_pretrained(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(CheckpointError, match=says) as caught:
        BuddyForCausalLM.from_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no model at"):
        BuddyForCausalLM.from_pretrained(tmp_path / "absent")
    with pytest.raises(ModelError, match="no model named 'nonsense'"):
        BuddyForCausalLM.from_pretrained("nonsense")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        BuddyForCausalLM.from_pretrained(tmp_path)
    tiny_model().save_pretrained(tmp_path / "base")
    weights = tmp_path / "base/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        BuddyForCausalLM.from_pretrained(tmp_path / "base")
    weights.unlink()
    torch.save({}, tmp_path / "base/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found only pytorch_model\.bin"):
        BuddyForCausalLM.from_pretrained(tmp_path / "base")


def test_an_unknown_family_says_how_to_add_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FamilyError, match="add a row to FAMILIES"):
        BuddyForCausalLM.from_pretrained(tmp_path)


def test_an_adapter_in_another_format_is_not_read(adapted, tmp_path):
    adapted.save_pretrained(tmp_path / "model")
    shutil.move(
        tmp_path / "model/adapter/adapter_model.safetensors",
        tmp_path / "model/adapter/adapter_model.bin",
    )
    path = tmp_path / "model/buddy.json"
    path.write_text(path.read_text().replace("adapter_model.safetensors", "adapter_model.bin"))
    with pytest.raises(CheckpointError, match="could run code"):
        BuddyForCausalLM.from_pretrained(tmp_path / "model")
