"""A hostile or damaged checkpoint: no code runs, no other file is opened, one line is said."""

import hashlib
import json
import shutil
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.checkpoint.card import read_card
from buddy.checkpoint.resolve import resolve
from buddy.errors import BuddyError, CheckpointError
from tests.hostile.folders import (
    EXAMPLES,
    SHAPES_BEYOND_TORCH,
    edit,
    forge_shape,
    opened_files,
    set_at,
    write_canary,
)
from tests.hostile.test_folders import refuses
from tests.tiny import random_ids, tiny_buddy, tiny_model

load = BuddyForCausalLM.from_pretrained


def list_again(folder):
    """Note every file in buddy.json as it is now, as one who damages a checkpoint can."""
    manifest = json.loads((folder / "buddy.json").read_text())
    manifest["files"] = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.rglob("*")
        if path.is_file() and path.name != "buddy.json"
    }
    (folder / "buddy.json").write_text(json.dumps(manifest))


def test_the_whole_checkpoint_loads_and_no_other_file_is_opened(checkpoint):
    load(checkpoint)  # what it imports, it imports now
    load_tokenizer(checkpoint)
    with opened_files() as opened:
        model, tokenizer = load(checkpoint, merge_adapter=True), load_tokenizer(checkpoint)
    assert model.predictor is not None
    assert tokenizer("w5 w6").input_ids == [5, 6]
    assert str(checkpoint.resolve() / "buddy.json") in opened


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("policy", 5, "policy: expected str, got 5"),
        ("policy", None, "policy: expected str, got null"),
        ("policy", "no such", "no policy 'no such'"),
        ("policy", "random:" + "9" * 5000, "takes a whole number"),
        ("policy", "static:a", "takes block numbers"),
        ("policy", "static:../order.json", "is read from a file outside"),
        ("policy", "searched:/tmp/sets.json", "is read from a file outside"),
        ("kv_policy", ["lazy"], "kv_policy: expected one of"),
        ("router", 5, "router: expected a table"),
        ("router.num_blocks", 10**12, "num_blocks must be at most 1,024"),
        ("router.num_blocks", "6", "num_blocks: expected int"),
        ("router.num_blocks", 7, "it is for 7 blocks, and the base model has 6"),
        ("router.token_width", 17, "the router reads 17 numbers a token"),
        ("router.token_width", 10**12, "token_width must be"),
        ("router.token_width", -1, "token_width must be"),
        ("router.planner.context_layer", 1.5, "context_layer: expected int, got 1.5"),
        ("router.planner.context_layer", 0, "context_layer must be"),
        ("router.planner.context_layer", True, "context_layer: expected int"),
        ("router.planner.context", "keys", "context: expected one of"),
        ("router.planner.ema_decay", 2, "ema_decay must be between 0 and 1"),
        ("router.planner", [], "planner: expected a table"),
        ("router.decision.omega", "x", "omega: expected float, got 'x'"),
        ("router.decision.omega", 1e300, "omega must be"),
        ("router.decision.rank", 10**9, "rank must be"),
        ("router.decision.rank", 60_000, "the router in .* does not fit its description"),
        ("router.decision.rank", 0, "rank must be"),
        ("predictor.rank", 10**9, "rank must be"),
        ("predictor.rank", 60_000, "the predictor in .* does not fit its description"),
        ("predictor", [], "predictor: expected a table"),
        ("base", [], "base: expected a table"),
        ("base.source", 5, "source: expected str, got 5"),
        ("base.source", "", "base.source must name a model"),
        ("base.source", "a\nb", "base.source must name a model"),
        ("base.source", "a" * 5000, "no model is called"),
        ("base.source", "~no-such-user/x", "no model|cannot be"),
        ("base.source", "smollm2-135m-buddy", "names another Buddy checkpoint"),
        ("base.num_blocks", "6", "num_blocks: expected int"),
        ("base.fingerprint", None, "expected the fingerprint of its weights or its tokenizer"),
        ("base.fingerprint", 5, "fingerprint: expected str"),
        ("base.tokenizer", 5, "tokenizer: expected str"),
        ("format", True, "format"),
        ("format", [1], "has format"),
        ("files", {}, "is not listed in buddy.json"),
        ("files", [], "it has no files"),
        ("extra", 1, "unknown key extra"),
    ],
)
def test_a_manifest_is_typed_and_ranged(checkpoint, key, value, says):
    edit(checkpoint / "buddy.json", lambda manifest: set_at(manifest, key, value))
    refuses(load, checkpoint, says)


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (b"", "is no JSON"),
        (b"\x80\x04\x95\xff", "is no JSON"),
        (b"[]", "holds a list"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"files":' * 100_000, "nests too deeply"),
        (b'{"format": 1, "x": Infinity}', "not a finite number"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_all_who_read_it(checkpoint, contents, says):
    (checkpoint / "buddy.json").write_bytes(contents)
    for reader in (load, load_tokenizer, resolve):
        refuses(reader, checkpoint, says)


def test_a_checkpoint_is_no_base_model_of_another_nor_of_itself(checkpoint, whole_checkpoint):
    for source in (checkpoint, whole_checkpoint):
        change = {"base": {"source": str(source)}}
        edit(checkpoint / "buddy.json", lambda m, c=change: m["base"].update(c["base"]))
        refuses(load, checkpoint, "names another Buddy checkpoint as its base model")
        refuses(resolve, checkpoint, "names another Buddy checkpoint as its base model")


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/passwd", "a/../../b", "a\\b", "c:/x", "", ".", "a//b", "a\0"]
)
def test_a_manifest_names_no_file_outside(checkpoint, name):
    entry = {"bytes": 1, "sha256": ""}
    edit(checkpoint / "buddy.json", lambda m: m["files"].update({name: entry}))
    with opened_files() as opened:
        refuses(load, checkpoint, "is no plain name of a file inside")
    assert not any(path in ("/etc/passwd", str(checkpoint.parent / "b")) for path in opened)


def test_a_model_card_is_no_link_that_leads_out(checkpoint):
    outside = checkpoint.parent / "outside"
    outside.write_text("secret")
    (checkpoint / "README.md").symlink_to(outside)
    assert load(checkpoint).card is None
    refuses(read_card, checkpoint, "is a link that leads out of the folder")


def test_a_listed_link_that_leads_out_is_refused(checkpoint):
    outside = checkpoint.parent / "outside"
    shutil.move(checkpoint / "routing.safetensors", outside)
    (checkpoint / "routing.safetensors").symlink_to(outside)
    refuses(load, checkpoint, "is a link that leads out of the folder")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "extra.safetensors",
        "pytorch_model.bin",
        "modeling_evil.py",
        "adapter/adapter_model.bin",
        "backbone/chat_template.jinja",
        "backbone/model.safetensors.index.json",
        "backbone/pytorch_model.bin",
        "sub/tokenizer.json",
    ],
)
def test_a_file_that_could_be_read_and_is_not_listed_is_refused(checkpoint, name):
    sung = checkpoint.parent / "sung"
    (checkpoint / name).parent.mkdir(exist_ok=True)
    write_canary(checkpoint / name, sung)
    refuses(load, checkpoint, "is not listed in buddy.json")
    assert not sung.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_what_is_read_of_the_backbone_alone_is_listed_too(checkpoint, name):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if not (checkpoint / "backbone" / file).exists():
            shutil.move(checkpoint / file, checkpoint / "backbone" / file)
    list_again(checkpoint)
    assert load_tokenizer(checkpoint)("w5").input_ids == [5]
    edit(checkpoint / "buddy.json", lambda m: m["files"].pop(f"backbone/{name}"))
    refuses(load_tokenizer, checkpoint, f"{name} is not listed")
    refuses(resolve, checkpoint, f"{name} is not listed")


def test_files_that_nobody_reads_may_lie_in_a_checkpoint(checkpoint):
    for name in ("README.md", "record.json", "LICENSE", ".gitattributes", "plot.pdf"):
        (checkpoint / name).write_text("---\n")
    (checkpoint / ".cache").mkdir()
    (checkpoint / ".cache/model.safetensors").write_text("")
    load(checkpoint)


def test_weights_that_are_hidden_are_not_read(tmp_path):
    BuddyForCausalLM(tiny_model(), policy="full").save_pretrained(tmp_path / "checkpoint")
    backbone = tmp_path / "checkpoint/backbone"
    (backbone / "model.safetensors").rename(backbone / ".part.safetensors")
    names = dict.fromkeys(load_file(backbone / ".part.safetensors"), ".part.safetensors")
    (backbone / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    list_again(tmp_path / "checkpoint")
    edit(
        tmp_path / "checkpoint/buddy.json",
        lambda m: m["files"].pop("backbone/.part.safetensors", None),
    )
    refuses(load, tmp_path / "checkpoint", "as a file of weights")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_tokenizer_file_is_checked_before_it_is_read(checkpoint, name):
    with (checkpoint / name).open("a") as file:
        file.write(" ")
    refuses(load_tokenizer, checkpoint, f"{name} has .* bytes, expected")
    edit(checkpoint / "buddy.json", lambda m: m["files"].pop(name))
    refuses(load_tokenizer, checkpoint, f"{name} is not listed")


def spoil(path, change):
    tensors = change(load_file(path))
    path.unlink()  # what was loaded may be mapped
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("part", ["prior", "router.decision.up.bias", "predictor.down.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_routing_by_what_is_no_number_is_refused(checkpoint, part, value):
    def change(tensors):
        tensors[part].view(-1)[1] = value
        return tensors

    spoil(checkpoint / "routing.safetensors", change)
    list_again(checkpoint)
    refuses(load, checkpoint, f"{part} holds what is no finite number")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {**t, "prior": torch.ones(2, 2)}, r"shape \[2, 2\], expected \[4\]"),
        (lambda t: {**t, "prior": torch.ones(3)}, r"shape \[3\], expected \[4\]"),
        (lambda t: {**t, "prior": torch.ones(4, dtype=torch.int64)}, "no finite number"),
        (lambda t: {**t, "prior": t["prior"].to(torch.float8_e4m3fn)}, "no finite number"),
        (lambda t: {"prior": t["prior"]}, "the router in .* does not fit"),
        (lambda t: {**t, "router.more": torch.ones(1)}, "the router in .* does not fit"),
        (lambda t: {**t, "router.decision.prior": torch.ones(5)}, "the router in .* does not fit"),
    ],
)
def test_routing_that_does_not_fit_is_refused(checkpoint, change, says):
    spoil(checkpoint / "routing.safetensors", change)
    list_again(checkpoint)
    refuses(load, checkpoint, says)


@pytest.mark.parametrize("shape", SHAPES_BEYOND_TORCH)
@pytest.mark.parametrize("name", ["routing.safetensors", "adapter/adapter_model.safetensors"])
def test_a_shape_beyond_torch_is_refused(checkpoint, name, shape):
    forge_shape(checkpoint / name, "a", shape)
    list_again(checkpoint)
    refuses(load, checkpoint, rf"{name} is damaged")


def test_routing_that_is_no_safetensors_is_refused(checkpoint):
    sung = checkpoint.parent / "sung"
    write_canary(checkpoint / "routing.safetensors", sung)
    list_again(checkpoint)
    refuses(load, checkpoint, r"routing\.safetensors is damaged")
    (checkpoint / "routing.safetensors").unlink()
    list_again(checkpoint)
    refuses(load, checkpoint, r"does not list routing\.safetensors")
    assert not sung.exists()


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected one of LORA"),
        ({"peft_type": "os.system"}, "peft_type: expected one of LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type: expected one of"),
        ({"r": 10**9}, "r must be at least 1 and at most 4,096"),
        ({"r": 4000}, "has rank 4,000, and the adapter's weights have at most 4"),
        ({"r": 3}, "does not fit its base model"),
        ({"r": -1}, "r must be at least 1"),
        ({"r": "4"}, "r: expected int"),
        ({"rank_pattern": {"q_proj": 10**9}}, "ranks must be"),
        ({"rank_pattern": {"(a+)+$": 2}}, "is no plain name of a layer"),
        ({"rank_pattern": 5}, "rank_pattern: expected a table"),
        ({"lora_alpha": None}, "lora_alpha: expected float"),
        ({"target_modules": "(.*)*x"}, "target_modules: expected a list"),
        ({"target_modules": ["(.*)*x"]}, "is no plain name of a layer"),
        ({"target_modules": ["no_such"]}, "does not fit its base model"),
        ({"target_modules": []}, "does not fit its base model"),
        ({"target_modules": ["q_proj"]}, "does not fit its base model"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save, which Buddy does not load"),
        ({"layer_replication": [[0, 10**6]]}, "sets layer_replication"),
        ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "sets megatron_"),
        ({"loftq_config": {"loftq_bits": 4}}, "sets loftq_config"),
        ({"trainable_token_indices": [1]}, "sets trainable_token_indices"),
        ({"no_such_setting": {"a": 1}}, "sets no_such_setting"),
    ],
)
def test_an_adapter_config_is_of_plain_lora(checkpoint, change, says, merge):
    edit(checkpoint / "adapter/adapter_config.json", lambda config: config.update(change))
    list_again(checkpoint)
    refuses(partial(load, merge_adapter=merge), checkpoint, says)


def test_where_an_adapter_comes_from_is_not_followed(checkpoint):
    before = load(checkpoint)
    sung = checkpoint.parent / "sung"
    hostile = {
        "base_model_name_or_path": "../../etc",
        "revision": "evil",
        "auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"},
        "init_lora_weights": "pissa",
        "inference_mode": False,
    }
    edit(checkpoint / "adapter/adapter_config.json", lambda config: config.update(hostile))
    write_canary(checkpoint / "adapter/adapter_model.bin", sung)
    list_again(checkpoint)
    ids = random_ids(1, 5)
    with torch.no_grad():
        assert torch.equal(load(checkpoint)(ids).logits, before(ids).logits)
    assert not sung.exists()


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {n: torch.full_like(w, torch.nan) for n, w in t.items()}, "no finite number"),
        (lambda t: {}, "the adapter's weights have at most 0"),
        (lambda t: dict(list(t.items())[:-1]), "1 tensors are missing or unexpected"),
        (lambda t: {**t, "base_model.model.more": torch.ones(2)}, "missing or unexpected"),
        (lambda t: {n: w.T.contiguous() for n, w in t.items()}, "does not fit its base model"),
    ],
)
def test_adapter_weights_that_do_not_fit_are_refused(checkpoint, change, says, merge):
    spoil(checkpoint / "adapter/adapter_model.safetensors", change)
    list_again(checkpoint)
    refuses(partial(load, merge_adapter=merge), checkpoint, says)


@pytest.mark.parametrize("contents", [b"", b"[]", b"{", b'{"a":' * 100_000, b"\x80\x04"])
def test_an_adapter_config_that_is_none_is_refused(checkpoint, contents):
    (checkpoint / "adapter/adapter_config.json").write_bytes(contents)
    list_again(checkpoint)
    refuses(load, checkpoint, "is no JSON|holds a list")


def test_a_pickle_in_the_backbone_is_not_read(checkpoint):
    sung = checkpoint.parent / "sung"
    shutil.move(checkpoint / "backbone/model.safetensors", checkpoint / "backbone/kept")
    for name in ("pytorch_model.bin", "outside.bin"):
        write_canary(checkpoint / "backbone" / name, sung)
    list_again(checkpoint)
    refuses(load, checkpoint, "found only outside.bin, which can run code")
    names = {"weight_map": {"model.norm.weight": "outside.bin"}}
    (checkpoint / "backbone/model.safetensors.index.json").write_text(json.dumps(names))
    list_again(checkpoint)
    refuses(load, checkpoint, "as a file of weights")
    assert not sung.exists()


def test_an_order_that_was_read_from_a_file_is_written_in_full(tmp_path):
    record = {"kind": "importance", "config": {}, "results": {"removal_order": [3, 1]}}
    (tmp_path / "order.json").write_text(json.dumps(record))
    buddy = tiny_buddy()
    buddy.set_policy(f"static:{tmp_path / 'order.json'}")
    buddy.save_pretrained(tmp_path / "saved")
    (tmp_path / "order.json").unlink()
    assert load(tmp_path / "saved").policy.removal_order == (3, 1)


def test_an_adapter_that_could_not_be_loaded_again_is_not_saved(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    buddy = BuddyForCausalLM(get_peft_model(tiny_model(), config).eval())
    with pytest.raises(CheckpointError, match="sets modules_to_save"):
        buddy.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "random", "static:1", 0, -1, 10**7, 1.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=4,
)
_FILES = (
    "buddy.json",
    "adapter/adapter_config.json",
    "backbone/config.json",
    "backbone/generation_config.json",
    "tokenizer_config.json",
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_in_any_json_file_loads_or_is_refused(whole_checkpoint, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "checkpoint"
    shutil.copytree(whole_checkpoint, folder)
    path = folder / data.draw(st.sampled_from(_FILES))
    values = json.loads(path.read_text())
    table = values
    for _ in range(data.draw(st.integers(0, 2))):
        inner = sorted(key for key, value in table.items() if isinstance(value, dict))
        table = table[data.draw(st.sampled_from(inner))] if inner else table
    keys = st.sampled_from(sorted(table)) if table else st.text(max_size=12)
    table[data.draw(keys | st.text(max_size=12))] = data.draw(_JSON)
    path.write_text(json.dumps(values))
    if path.name != "buddy.json":
        list_again(folder)
    _load_or_refuse(folder)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_byte_of_any_file_loads_or_is_refused(whole_checkpoint, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "checkpoint"
    shutil.copytree(whole_checkpoint, folder)
    path = data.draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
    contents = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, min(len(contents) - 1, 2000)))] = data.draw(
            st.integers(0, 255)
        )
    path.write_bytes(contents)
    if path.name != "buddy.json" and data.draw(st.booleans()):
        list_again(folder)
    _load_or_refuse(folder)


def _load_or_refuse(folder):
    said = ""
    try:
        model = load(folder)
        load_tokenizer(folder)
        model(random_ids(1, 3), budget=0.7)
    except BuddyError as error:
        said = str(error)
    shutil.rmtree(folder)
    assert "\n" not in said
