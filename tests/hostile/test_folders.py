"""A hostile or damaged model folder: no code runs, no other file is opened, one line is said."""

import json
import os
import shutil
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.errors import BuddyError, ModelError, PromptError
from buddy.hub.config import read_config
from buddy.hub.loading import inspect_model
from buddy.hub.place import find_model
from buddy.inference import InferenceModel
from tests.hostile.folders import (
    EXAMPLES,
    SHAPES_BEYOND_TORCH,
    edit,
    forge_shape,
    opened_files,
    write_canary,
)
from tests.tiny import CONFIGS, random_ids, tiny_model

INDEX = "model.safetensors.index.json"


def inspect(folder):
    return inspect_model(find_model(folder))


def refuses(load, folder, says):
    with pytest.raises(BuddyError, match=says) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return caught.value


def shard(folder, name="part.safetensors"):
    """Put the weights behind an index."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / INDEX).write_text(json.dumps(index))


def test_a_whole_folder_loads_and_transformers_opens_none_of_its_files(model_folder):
    load_tokenizer(model_folder)  # what it imports, it imports now
    with opened_files() as opened:
        BuddyForCausalLM.from_pretrained(model_folder)
        tokenizer = load_tokenizer(model_folder)
    inside = str(model_folder.resolve())
    assert any(path.startswith(inside) for path in opened)
    assert tokenizer("w5 w6").input_ids == [5, 6]
    assert tokenizer.name_or_path == str(model_folder)


def test_shards_behind_an_index_load(model_folder):
    whole = BuddyForCausalLM.from_pretrained(model_folder)
    shard(model_folder)
    ids = random_ids(1, 5)
    with torch.no_grad():
        parts = BuddyForCausalLM.from_pretrained(model_folder)(ids).logits
        assert torch.equal(parts, whole(ids).logits)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "evil.bin",
            "../outside.bin",
            "../model.safetensors",
            "../../../etc/passwd",
            "/etc/passwd",
        ),
        *(
            "sub/part.safetensors",
            ".part.safetensors",
            "evil.pkl",
            "evil.safetensors.bin",
            "",
            "..",
            5,
            None,
            ["a"],
        ),
    ],
)
def test_an_index_names_safetensors_of_its_own_folder_alone(model_folder, name):
    sung = model_folder.parent / "sung"
    for place in ("evil.bin", "evil.pkl", "evil.safetensors.bin", "../outside.bin"):
        write_canary(model_folder / place, sung)
    shard(model_folder)
    edit(model_folder / INDEX, lambda i: i["weight_map"].update({"model.norm.weight": name}))
    refuses(BuddyForCausalLM.from_pretrained, model_folder, "as a file of weights")
    assert not sung.exists()


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ("[]", "holds a list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors is missing"),
        ('{"a":' * 100_000, "nests too deeply"),
        ("\x00\xff", "is no JSON"),
    ],
)
def test_a_damaged_index_is_refused(model_folder, contents, says):
    shard(model_folder)
    (model_folder / INDEX).write_text(contents)
    refuses(BuddyForCausalLM.from_pretrained, model_folder, says)


def test_a_weight_in_two_files_is_refused(model_folder):
    shard(model_folder)
    twice = load_file(model_folder / "part.safetensors")["model.norm.weight"]
    save_file({"model.norm.weight": twice + 1}, model_folder / "other.safetensors")
    other = {"model.norm.weight": "other.safetensors"}
    edit(model_folder / INDEX, lambda index: index["weight_map"].update(other))
    says = r"'model\.norm\.weight', and so does another file"
    refuses(BuddyForCausalLM.from_pretrained, model_folder, says)


def test_a_single_file_beside_an_index_of_others_is_refused(model_folder):
    whole = (model_folder / "model.safetensors").read_bytes()
    shard(model_folder)
    BuddyForCausalLM.from_pretrained(model_folder)
    (model_folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(ModelError, match="names other files: delete the one that is not") as caught:
        BuddyForCausalLM.from_pretrained(model_folder)
    assert "\n" not in str(caught.value)


def test_a_folder_with_an_adapter_alone_says_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is an adapter of another model: merge it"):
        BuddyForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["e{}", "model.layers.1.e{}.weight", "e{}.inv_freq"])
def test_tensors_without_end_are_refused_before_each_is_named(model_folder, name):
    path = model_folder / "model.safetensors"
    more = {name.format(i): torch.zeros(0) for i in range(300)}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="tensors, and a model of its sizes has at most"):
        BuddyForCausalLM.from_pretrained(model_folder)


def test_links_out_of_the_folder_are_refused_and_those_of_the_hubs_cache_are_not(model_folder):
    repository = model_folder.parent / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model_folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    BuddyForCausalLM.from_pretrained(snapshot)
    load_tokenizer(snapshot)
    outside = model_folder.parent / "outside"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        shutil.copytree(snapshot, outside, dirs_exist_ok=True)  # copies what the links lead to
        (outside / name).unlink()
        (outside / name).symlink_to(snapshot / name)
        load = load_tokenizer if name == "tokenizer.json" else BuddyForCausalLM.from_pretrained
        refuses(load, outside, f"{name} is a link that leads out of the folder")
        shutil.rmtree(outside)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(model_folder):
    (model_folder / "config.json").unlink()
    os.mkfifo(model_folder / "config.json")
    refuses(BuddyForCausalLM.from_pretrained, model_folder, "no regular file")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"num_attention_heads": -4}, "num_attention_heads must be at least 1"),
        ({"num_attention_heads": 3}, "describes no model|do not fit"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
        ({"num_key_value_heads": 3}, "do not fit|does not compute"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 1000}, "of 6 blocks, and it has num_hidden_layers 1000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers must be at least 1"),
        ({"num_hidden_layers": 6.5}, "describes no model"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"vocab_size": 10**30}, "vocab_size must be"),
        ({"vocab_size": 2**23}, "a model of its sizes has"),
        ({"hidden_size": 2**19}, "a model of its sizes has"),
        ({"hidden_size": 31}, "describes no model|do not fit"),
        ({"intermediate_size": 2**21}, "a model of its sizes has"),
        ({"intermediate_size": 47}, "do not fit"),
        ({"head_dim": 2**13}, "a model of its sizes has"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be"),
        ({"hidden_act": "foo"}, "describes no model: KeyError 'foo'"),
        ({"hidden_act": 5}, "describes no model"),
        ({"rms_norm_eps": "x"}, "describes no model"),
        ({"pad_token_id": 10**6}, "describes no model"),
        ({"dtype": "int8"}, "dtype must be float32"),
        ({"dtype": "nn"}, "describes no model"),
        ({"dtype": "no_such_dtype"}, "describes no model"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1e9}}, "partial_"),
        ({"rope_parameters": {"rope_type": "no such"}}, "describes no model"),
        ({"rope_parameters": "x"}, "describes no model"),
        ({"model_type": 5}, "model type 5 is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "bert"}, "is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantised"),
        ({"compression_config": {"quant_method": "sparseml"}}, "its weights are quantised"),
        ({"use_bidirectional_attention": True}, "is not supported"),
        ({"is_encoder_decoder": True}, "with is_encoder_decoder is not supported"),
    ],
)
def test_an_impossible_config_is_refused(model_folder, change, says):
    edit(model_folder / "config.json", lambda config: config.update(change))
    refuses(BuddyForCausalLM.from_pretrained, model_folder, says)


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (b"", "is no JSON"),
        (b"\x80\x04\x95\xff\x00", "is no JSON"),
        (b"[]", "holds a list"),
        (b"null", "holds a NoneType"),
        (b'{"a":' * 100_000, "nests too deeply"),
        (b'{"vocab_size": NaN}', "not a finite number"),
        (b"{}", "model type None is not supported"),
    ],
)
def test_a_config_that_is_no_config_is_refused(model_folder, contents, says):
    (model_folder / "config.json").write_bytes(contents)
    refuses(BuddyForCausalLM.from_pretrained, model_folder, says)
    refuses(inspect, model_folder, says)
    refuses(load_tokenizer, model_folder, says)


def test_what_a_config_says_besides_is_not_passed_on(model_folder):
    """Each of these makes transformers do something, or replaces a part of its config."""
    sung = model_folder.parent / "sung"
    write_canary(model_folder / "evil.bin", sung)
    (model_folder / "evil.py").write_text(f"import os; os.mkdir({str(sung)!r})")
    (model_folder / "custom_generate").mkdir()
    (model_folder / "custom_generate/generate.py").write_text(f"import os; os.mkdir('{sung}')")
    (model_folder / "adapter_config.json").write_text('{"base_model_name_or_path": "../other"}')
    (model_folder / ".metadata").write_bytes((model_folder / "evil.bin").read_bytes())
    ids = random_ids(1, 5)
    with torch.no_grad():
        wanted = BuddyForCausalLM.from_pretrained(model_folder)(ids).logits
    hostile = {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "attn_implementation": "org/kernel",
        "_attn_implementation": "org/kernel",
        "_attn_implementation_internal": "org/kernel",
        "experts_implementation": "org/kernel",
        "transformers_weights": "../outside.safetensors",
        "configuration_files": ["../config.4.0.0.json"],
        "fusion_config": {"a": True},
        "kernel_config": {"a": True},
        "distributed_config": {"tp_size": 2},
        "per_layer_config": {"0": {"hidden_size": 5}},
        "attribute_map": {"hidden_size": "vocab_size"},
        "sub_configs_defaults": {"a": "b"},
        "base_model_tp_plan": 5,
        "to_dict": 5,
        "to_json_string": 5,
        "get_text_config": None,
        "name_or_path": 5,
        "__class__": 5,
        "__dict__": 5,
        "__init__": None,
    }
    before, whole = read_config(model_folder), (model_folder / "config.json").read_text()
    for name, value in hostile.items():
        edit(model_folder / "config.json", lambda c, n=name, v=value: c.update({n: v}))
        assert read_config(model_folder).to_dict() == before.to_dict(), name
        (model_folder / "config.json").write_text(whole)
    edit(model_folder / "config.json", lambda c: c.update(hostile))
    model = BuddyForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted)
    assert not sung.exists()


def test_what_only_backbone_finds_missing_is_one_line(tmp_path):
    tiny_model("phi3").save_pretrained(tmp_path)
    rope = {"rope_type": "longrope", "rope_theta": 1e4}
    for parameters in (rope, rope | {"short_factor": 5}):
        edit(tmp_path / "config.json", lambda c, p=parameters: c.update(rope_parameters=p))
        refuses(BuddyForCausalLM.from_pretrained, tmp_path, "describes no model|cannot be run")
        refuses(inspect, tmp_path, "describes no model|cannot be taken apart")


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_has_the_config_that_transformers_reads(family, tmp_path):
    CONFIGS[family].save_pretrained(tmp_path)
    ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.to_dict() == theirs.to_dict()


def nan(tensors):
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (nan, "logits are not finite"),
        (lambda t: {**t, "lm_head.weight": t["lm_head.weight"] * torch.inf}, "are not finite"),
        (lambda t: {n: w.to(torch.int8) for n, w in t.items()}, "stored as I8"),
        (lambda t: {n: w.to(torch.float8_e4m3fn) for n, w in t.items()}, "stored as F8_E4M3"),
        (lambda t: {n: w for n, w in t.items() if "norm" not in n}, "do not fit its config"),
        (lambda t: {**t, "model.extra.weight": torch.ones(3)}, r"such as 'model\.extra\.weight'"),
        (lambda t: {**t, "model.norm.weight": torch.ones(31)}, "do not fit its config"),
        (lambda t: {**t, "model.norm.weight": torch.ones(64)}, r"such as 'model\.norm\.weight'"),
        (lambda t: {}, "of 0 blocks"),
    ],
)
def test_weights_that_are_none_are_refused(model_folder, change, says):
    path = model_folder / "model.safetensors"
    tensors = change(load_file(path))
    path.unlink()  # what was loaded may be mapped
    save_file(tensors, path, metadata={"format": "pt"})
    refuses(BuddyForCausalLM.from_pretrained, model_folder, says)


def header(text):
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("name", ["model.norm.weight", "e.inv_freq"])
@pytest.mark.parametrize("shape", SHAPES_BEYOND_TORCH)
def test_weights_without_numbers_are_refused(model_folder, name, shape):
    forge_shape(model_folder / "model.safetensors", name, shape)
    refuses(
        BuddyForCausalLM.from_pretrained, model_folder, f"{name} has a shape that no tensor has"
    )


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\x80\x04pickle",
        struct.pack("<Q", 2**63) + b"{}",
        header(b"{"),
        header(b"[]"),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
        header(b'{"a":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}') + bytes(16),
        header(b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}') + bytes(16),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}') + bytes(16),
    ],
)
def test_damaged_safetensors_are_refused(model_folder, contents):
    (model_folder / "model.safetensors").write_bytes(contents)
    refuses(BuddyForCausalLM.from_pretrained, model_folder, "truncated or damaged")


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ("[]", "holds a list"),
        ("{", "is no JSON"),
        ('{"eos_token_id": "x"}', "eos_token_id must be a token's number"),
        ('{"eos_token_id": [1, {}]}', "eos_token_id must be a token's number"),
        ('{"pad_token_id": 1.5}', "pad_token_id must be a token's number"),
        ('{"eos_token_id": true}', "eos_token_id must be a token's number"),
        ('{"eos_token_id": 97}', "eos_token_id must be a token of the model, from 0 to 96, got 97"),
        ('{"eos_token_id": [2, -1]}', "eos_token_id must be a token of the model"),
        ('{"early_stopping": "no such"}', "describes no generation"),
        ('{"watermarking_config": 5}', "describes no generation"),
    ],
)
def test_a_malformed_generation_config_is_refused(model_folder, contents, says):
    (model_folder / "generation_config.json").write_text(contents)
    refuses(BuddyForCausalLM.from_pretrained, model_folder, says)


def test_ends_of_config_json_are_the_models_too_and_pads_need_not_be(model_folder):
    edit(model_folder / "generation_config.json", lambda said: said.update(pad_token_id=97))
    assert BuddyForCausalLM.from_pretrained(model_folder).generation_config.pad_token_id == 97
    (model_folder / "generation_config.json").unlink()
    edit(model_folder / "config.json", lambda config: config.update(eos_token_id=97))
    refuses(BuddyForCausalLM.from_pretrained, model_folder, "from 0 to 96, got 97")
    refuses(InferenceModel.describe, model_folder, "from 0 to 96, got 97")


def test_a_generation_config_replaces_no_method(model_folder):
    hostile = {"to_dict": 5, "validate": None, "custom_generate": "evil", "__class__": 5}
    edit(model_folder / "generation_config.json", lambda g: g.update(hostile))
    model = BuddyForCausalLM.from_pretrained(model_folder)
    assert model.generate(random_ids(1, 3), max_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer_class": "LlamaForCausalLM"}, "is no tokenizer of the tokenizers library"),
        ({"tokenizer_class": "AutoModelForCausalLM"}, "is no tokenizer of the tokenizers"),
        ({"tokenizer_class": "pipeline"}, "is no tokenizer of the tokenizers library"),
        ({"tokenizer_class": "utils"}, "is no tokenizer of the tokenizers library"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "is no tokenizer|cannot be had"),
        ({"tokenizer_class": 5}, "tokenizer_class must be a name"),
        (
            {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}},
            "is code that comes with the model",
        ),
        ({"added_tokens_decoder": {"x": {}}}, "cannot be loaded"),
        ({"added_tokens_decoder": 5}, "cannot be loaded"),
        ({"eos_token": 5}, "cannot be loaded"),
        ({"model_max_length": []}, "cannot be loaded"),
        ({"truncation_side": "up"}, "cannot be loaded"),
    ],
)
def test_a_tokenizer_config_runs_nothing(model_folder, change, says):
    sung = model_folder.parent / "sung"
    (model_folder / "evil.py").write_text(f"import os; os.mkdir({str(sung)!r})")
    write_canary(model_folder / "pytorch_model.bin", sung)
    (model_folder / "model.safetensors").unlink()
    shutil.copyfile(model_folder / "pytorch_model.bin", model_folder / "model.safetensors")
    edit(model_folder / "tokenizer_config.json", lambda config: config.update(change))
    refuses(load_tokenizer, model_folder, says)
    assert not sung.exists()


def test_a_tokenizer_config_names_no_file(model_folder):
    secret = model_folder.parent / "tokenizer.4.0.0.json"
    shutil.copyfile(model_folder / "tokenizer.json", secret)
    named = {
        name: str(secret)
        for name in ("tokenizer_file", "vocab_file", "merges_file", "vocab", "merges", "gguf_file")
    }
    hostile = {
        **named,
        "fast_tokenizer_files": ["../tokenizer.4.0.0.json"],
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "init_inputs": [str(secret)],
        "tokenizer_object": str(secret),
        "name_or_path": "org/other",
        "trust_remote_code": True,
    }
    edit(model_folder / "tokenizer_config.json", lambda config: config.update(hostile))
    with opened_files() as opened:
        assert load_tokenizer(model_folder)("w5 w6").input_ids == [5, 6]
    assert str(secret.resolve()) not in opened
    (model_folder / "tokenizer.json").unlink()
    with opened_files() as opened:
        refuses(load_tokenizer, model_folder, "cannot be loaded")
    assert str(secret.resolve()) not in opened


def test_a_tokenizer_is_saved_whole_after_it_was_loaded(model_folder):
    load_tokenizer(model_folder).save_pretrained(model_folder.parent / "again")
    edit(model_folder / "config.json", lambda c: None)
    shutil.copyfile(model_folder / "config.json", model_folder.parent / "again/config.json")
    shutil.copyfile(
        model_folder / "model.safetensors", model_folder.parent / "again/model.safetensors"
    )
    again = load_tokenizer(model_folder.parent / "again")
    assert again("w5 w6").input_ids == [5, 6]
    assert again.padding_side == "left"


@pytest.mark.parametrize("contents", [b"", b"[]", b'{"a":' * 100_000, b"{}", b'{"model": 5}'])
def test_a_damaged_tokenizer_is_refused(model_folder, contents):
    (model_folder / "tokenizer.json").write_bytes(contents)
    refuses(load_tokenizer, model_folder, "holds a list|is no JSON|cannot be loaded")


def test_logits_that_are_not_finite_end_generation_in_one_line(model_folder):
    model = BuddyForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.backbone.blocks[2].mlp.down_proj.weight[0, 0] = torch.nan
    for options in ({}, {"do_sample": True}, {"num_beams": 2}, {"draft_budget": "4 blocks"}):
        with pytest.raises(ModelError, match="logits after 5 tokens are not finite"):
            model.generate(random_ids(1, 5), max_new_tokens=3, **options)


def test_a_token_that_the_model_does_not_know_is_refused(model_folder):
    model = BuddyForCausalLM.from_pretrained(model_folder)
    for token in (97, 10**9, -1):
        with pytest.raises(PromptError, match=f"token id {token} is not one"):
            model.generate(torch.tensor([[5, token, 6]]), max_new_tokens=2)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["llama", "../x", "/etc/passwd", "auto", "sdpa", 0, -1, 10**7, 1.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=4,
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_in_any_json_file_loads_or_is_refused(whole_model, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    shutil.copytree(whole_model, folder)
    names = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
    path = folder / data.draw(st.sampled_from(names))
    values = json.loads(path.read_text())
    keys = st.sampled_from(sorted(values)) | st.text(max_size=12)
    for _ in range(data.draw(st.integers(1, 3))):
        values[data.draw(keys)] = data.draw(_JSON)
    path.write_text(json.dumps(values))
    _load_or_refuse(folder)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_byte_of_any_file_loads_or_is_refused(whole_model, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    shutil.copytree(whole_model, folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    contents = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, min(len(contents) - 1, 2000)))] = data.draw(
            st.integers(0, 255)
        )
    path.write_bytes(contents[: data.draw(st.integers(0, len(contents)))])
    _load_or_refuse(folder)


def _load_or_refuse(folder):
    said = ""
    try:
        model, tokenizer = BuddyForCausalLM.from_pretrained(folder), load_tokenizer(folder)
        ids = tokenizer("w5 w6", return_tensors="pt").input_ids
        model(ids, budget=0.7)
    except BuddyError as error:
        said = str(error)
    shutil.rmtree(folder)
    assert "\n" not in said
