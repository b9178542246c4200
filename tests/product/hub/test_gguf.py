"""A GGUF file becomes the model it describes, or an error that says what is wrong with it."""

import math
import random
import re
import warnings

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as chatter

from buddy.errors import CheckpointError
from buddy.hub.convert import convert_gguf
from buddy.hub.gguf.header import read_header
from buddy.hub.progress import silent
from tests.product.hub.gguf_files import (
    BEGIN,
    CHAT_TEMPLATE,
    END,
    END_OF_TEXT,
    NUM_BLOCKS,
    TOKENS,
    tiny_model,
    write_gguf,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def convert(tmp_path):
    """Write a GGUF file, convert it, and give back the folder."""

    def run(model=None, on_progress=silent, **how):
        path, folder = tmp_path / "model.gguf", tmp_path / "model"
        write_gguf(path, model, **how)
        folder.mkdir()
        convert_gguf(read_header(path), folder, on_progress)
        return folder

    return run


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_conversion_is_the_inverse_of_writing(convert, architecture, tied):
    model = tiny_model(architecture, tie_word_embeddings=tied)
    converted = load(convert(model))
    assert converted.config.model_type == architecture
    expected, got = model.state_dict(), converted.state_dict()
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert got[name].dtype == torch.bfloat16
        assert_close(got[name], weight, rtol=0, atol=0)
    ids = torch.arange(20)[None]
    # The same weights and the same kernels: nothing may differ, rotary layout included.
    assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_tokenizer_and_generation_settings_agree(convert):
    folder = convert()
    tokenizer, generation = AutoTokenizer.from_pretrained(folder), load(folder).generation_config
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.bos_token_id == generation.bos_token_id == BEGIN
    assert tokenizer.eos_token_id == generation.eos_token_id == END
    # The file names no padding token.
    assert tokenizer.pad_token_id == generation.pad_token_id == END
    assert tokenizer.model_max_length == 64
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    assert chat[0] == BEGIN
    assert END in chat


def test_a_turn_that_ends_with_another_token_ends_the_text_too(convert):
    folder = convert(tokenizer__ggml__eot_token_id=END_OF_TEXT)
    assert load(folder).generation_config.eos_token_id == [END_OF_TEXT, END]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("smollm", ["x", "ĠĠ", "1", "2"]),  # digits apart, and so the spaces stay together
        ("gpt-2", ["x", "Ġ", "Ġ", "12"]),
        (None, ["x", "Ġ", "Ġ", "12"]),
        ("qwen2", ["x", "Ġ", "Ġ", "1", "2"]),
        ("llama-bpe", ["<|im_start|>", "x", "Ġ", "Ġ", "12"]),
    ],
)
def test_words_are_cut_by_the_rule_the_file_names(convert, rule, expected):
    tokenizer = AutoTokenizer.from_pretrained(convert(rule=rule))
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  12").input_ids) == expected


def test_llama3_looks_whole_words_up(convert):
    tokenizer = AutoTokenizer.from_pretrained(convert(rule="llama-bpe"))
    assert tokenizer("wholeword").input_ids == [BEGIN, TOKENS.index("wholeword")]


def test_conversion_reports_tensors_and_writes_nothing(convert, capfd):
    reports = []
    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        convert(on_progress=lambda *report: reports.append(report))
    num_tensors = 9 * NUM_BLOCKS + 3
    assert reports == [("convert", done, num_tensors) for done in range(num_tensors + 1)]
    assert capfd.readouterr() == ("", "")
    assert heard == []
    assert (chatter.get_verbosity(), chatter.is_progress_bar_enabled()) == (level, bars)


def test_files_can_be_read_by_those_who_can_read_the_config(convert):
    assert len({file.stat().st_mode for file in convert().iterdir()}) == 1


def llama3_factors(model):
    """Base frequencies over those transformers works out: what llama.cpp stores."""
    base = 500_000.0 ** (-torch.arange(0, 64, 2) / 64)
    return (base / model.model.rotary_emb.inv_freq).tolist()


def test_llama3_rope_survives(convert):
    wide = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = tiny_model(rope_parameters=LLAMA3_ROPE, **wide)
    factors = llama3_factors(model)
    assert len({round(factor, 3) for factor in factors}) > 2  # scaled, unscaled and between
    converted = load(convert(model, rope_factors=factors))
    # rtol: the table went through 32 bits.
    assert_close(
        converted.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-5, atol=0
    )


def test_linear_rope_survives(convert):
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    model = tiny_model(rope_parameters=rope)
    stated = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    converted = load(convert(model, **stated))
    got, expected = converted.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq
    assert_close(got, expected, rtol=0, atol=0)


LINEAR = {"llama__rope__scaling__type": "linear"}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"general__architecture": "warpnet"}, "architecture 'warpnet'.*expected one of llama"),
        ({"split__count": 3}, "one of 3 parts.*merge"),
        ({"llama__expert_count": 8}, "mixture of 8 experts"),
        ({"tokens": False}, "holds no tokenizer"),
        ({"rule": "martian"}, "unknown rule 'martian'"),
        ({"omit": {"blk.1.ffn_up.weight"}}, "lacks 1 weights.*layers.1.mlp.up_proj"),
        (
            {"extra": {"blk.0.attn_q.bias": torch.zeros(32).numpy()}},
            "holds 32320 weights, but a llama model of its sizes has 32288",
        ),
        ({"poison": "blk.0.attn_v.weight"}, "damaged: model.layers.0.self_attn.v_proj.weight"),
        ({"rope_factors": [1.0, 2.0, 3.0, 4.0]}, "not that of Llama 3"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        (LINEAR | {"llama__rope__scaling__factor": math.nan}, "factor is nan, expected a finite"),
        (LINEAR | {"llama__rope__scaling__factor": 0.0}, "'linear' with the factor 0.0"),
        (LINEAR | {"llama__rope__scaling__factor": -4.0}, "'linear' with the factor -4.0"),
        ({"llama__rope__dimension_count": 4}, "rotates 4 of the 8 numbers of a head"),
        ({"llama__attention__layer_norm_rms_epsilon": math.inf}, "epsilon is inf, expected"),
        ({"tokenizer__ggml__eot_token_id": "x"}, "cannot be read: TypeError"),
        ({"llama__block_count": 10**9}, "says that it has 1000000000 blocks, and has tensors of 2"),
        ({"llama__embedding_length": 2**16}, "but a llama model of its sizes has"),
        ({"llama__attention__head_count": 0}, "cannot be read: "),
        ({"tokenizer__ggml__padding_token_id": 9999}, r"cannot be read: .*expected a GGUF file"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_in_one_line(convert, how, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(**how)
    assert "\n" not in str(caught.value)


def test_what_is_not_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for content in (b"", b"GG", b"PK\x03\x04 a wheel by mistake"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a GGUF file: expected it to begin"):
            read_header(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    read_header(path)
    for length in [*range(4, 200), 1000, 5000, len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is damaged or cut short"):
            read_header(path)


def test_a_damaged_header_is_read_or_refused_but_never_hangs(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    random.seed(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[random.randrange(4, 6000)] = random.choice([0, 1, 127, 128, 255])
        path.write_bytes(damaged)
        try:
            read_header(path)
        except CheckpointError as error:
            refused += 1
            assert re.search(r"damaged|architecture|no tokenizer", str(error))  # noqa: PT017
    assert refused > 100
