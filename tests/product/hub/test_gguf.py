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
from buddy.hub.gguf.rope import rope_scaling
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


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"temp": 0.6, "top_k": 20, "top_p": 0.95}, (True, 0.6, 20, 0.95)),
        ({"penalty_repeat": 1.1, "mirostat": 0, "mirostat_tau": 5.0}, (True, None, None, None)),
        ({"temp": 0.0, "top_k": 40}, (False, None, None, None)),
        ({"top_k": 0, "penalty_repeat": 1.0, "penalty_last_n": 64}, (True, None, 0, None)),
        ({}, (None, None, None, None)),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_the_file_wants_it(convert, stated, expected):
    folder = convert(**{f"general__sampling__{name}": value for name, value in stated.items()})
    config = load(folder).generation_config
    got = (config.do_sample, config.temperature, config.top_k, config.top_p)
    assert got == pytest.approx(expected)
    assert config.repetition_penalty == pytest.approx(stated.get("penalty_repeat"))


def test_a_turn_that_ends_with_another_token_ends_the_text_too(convert):
    folder = convert(tokenizer__ggml__eot_token_id=END_OF_TEXT)
    assert load(folder).generation_config.eos_token_id == [END_OF_TEXT, END]


@pytest.mark.parametrize("stated", ["nothing", "a template", "eom"])
def test_a_turn_that_ends_with_a_token_that_no_key_names_ends_the_text_too(convert, stated):
    # llama.cpp knows these by their names; others are known by the template or a key.
    named = {"tokenizer__ggml__eos_token_id": END_OF_TEXT, "tokenizer__chat_template": None}
    if stated == "a template":
        turns = CHAT_TEMPLATE.replace("<|im_end|>", "<|turn_end|>")
        tokens = [token.replace("<|im_end|>", "<|turn_end|>") for token in TOKENS]
        named |= {"tokens": tokens, "tokenizer__chat_template": turns}
    elif stated == "eom":
        tokens = [token.replace("<|im_end|>", "<|any|>") for token in TOKENS]
        named |= {"tokens": tokens, "tokenizer__ggml__eom_token_id": END}
    assert load(convert(**named)).generation_config.eos_token_id == [END_OF_TEXT, END]


USER, BREAK = "<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"


def test_control_tokens_of_any_letters_are_one_token_of_the_vocabulary(convert):
    tokens = [BREAK, USER, *TOKENS[2:-1], "<\uff5ctool\uff5c>"]
    types = [3, 3, 3, *[1] * (len(tokens) - 4), 4]
    folder = convert(
        rule="deepseek-r1-qwen",
        tokens=tokens,
        tokenizer__ggml__token_type=types,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=0,
        tokenizer__ggml__add_bos_token=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(tokens)
    assert tokenizer(f"x{USER}y{BREAK}<\uff5ctool\uff5c>").input_ids == [
        *(1, tokens.index("x"), 1, tokens.index("y"), 0, len(tokens) - 1)
    ]
    assert tokenizer.eos_token_id == 0
    assert tokenizer.decode([1, tokens.index("x"), 261]) == f"{USER}x<\uff5ctool\uff5c>"
    read = tokenizer.decode([1, tokens.index("x"), 261, 0], skip_special_tokens=True)
    assert read == "x<\uff5ctool\uff5c>"  # of the file's own, but no control token
    assert load(folder).generation_config.eos_token_id == [0, END]


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_sentencepiece_vocabulary_has_a_space_before_a_text_where_the_file_says_so(
    convert, prefix
):
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "\u2581a"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words]
    folder = convert(
        model=tiny_model(vocab_size=len(tokens)),
        rule="default",
        tokens=tokens,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__token_type=[2, 3, 3, *[6] * 256, 1, 1, 1],
        tokenizer__ggml__scores=[0.0] * 259 + [-2.0, -1.0, -1.5],
        tokenizer__ggml__merges=None,
        tokenizer__ggml__unknown_token_id=0,
        tokenizer__ggml__add_space_prefix=prefix,
        tokenizer__chat_template=None,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin = "a" if prefix is False else "\u2581a"
    assert tokenizer.convert_ids_to_tokens(tokenizer("a a").input_ids) == ["<s>", begin, "\u2581a"]
    assert tokenizer.decode(tokenizer("a a").input_ids, skip_special_tokens=True) == "a a"
    spaced = tokenizer.decode([261, 260])  # what an answer begins with
    assert spaced == (" aa" if prefix is False else "aa")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("default", ["x", "Ġ", "Ġ", "12"]),
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


def scaled(architecture, **keys):
    return {f"{architecture}__rope__{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(convert, architecture):
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    model = tiny_model(architecture, rope_parameters=rope)
    converted = load(convert(model, **scaled(architecture, scaling__factor=4.0)))
    got, expected = converted.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq
    assert_close(got, expected, rtol=0, atol=0)


_LINEAR_4 = {"rope_type": "linear", "factor": 4.0}
_YARN_4 = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("stated", "scaling"),
    [
        ({"scaling__factor": 4.0}, _LINEAR_4),
        ({"scale_linear": 4.0}, _LINEAR_4),
        ({"scaling__type": "linear", "scale_linear": 4.0}, _LINEAR_4),
        ({"scaling__factor": 4.0, "scale_linear": 2.0, "scaling__finetuned": True}, _LINEAR_4),
        ({"scaling__factor": 1.0}, {}),
        ({"scaling__type": "linear"}, {}),
        ({"scaling__type": "none", "scaling__factor": 4.0}, {}),
        ({"scaling__original_context_length": 32}, {}),
        ({"scaling__attn_factor": 1.0, "scaling__yarn_ext_factor": 0.0}, {}),
        (
            {
                "scaling__type": "yarn",
                "scaling__factor": 4.0,
                "scaling__original_context_length": 16,
                "scaling__attn_factor": 1.0,
                "scaling__yarn_ext_factor": 1.0,
                "scaling__yarn_attn_factor": 1.0,
                "scaling__yarn_beta_fast": 32.0,
                "scaling__yarn_beta_slow": 1.0,
                "scaling__yarn_log_multiplier": 0.0,
            },
            _YARN_4 | {"original_max_position_embeddings": 16},
        ),
    ],
    ids=str,
)
def test_scaling_is_read_as_llama_cpp_reads_it(tmp_path, stated, scaling):
    write_gguf(tmp_path / "model.gguf", **scaled("llama", **stated))
    assert rope_scaling(read_header(tmp_path / "model.gguf")) == scaling


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
        (scaled("llama", scaling__factor=-4.0), "'linear' with the factor -4.0"),
        (scaled("llama", scaling__alpha=1000.0), "'linear' with alpha 1000.0"),
        (scaled("llama", scaling__attn_factor=0.5), "attn_factor 0.5"),
        (scaled("llama", scaling__yarn_ext_factor=1.0), "yarn_ext_factor 1.0"),
        (scaled("llama", scaling__type="yarn", scaling__yarn_beta_fast=8.0), "beta_fast 8.0"),
        (
            {"llama__rope__scaling__factor": 4.0, "rope_factors": [1.0, 2.0, 3.0, 4.0]},
            "both a table and 'linear'",
        ),
        ({"llama__attention__scale": 0.5}, "sets llama.attention.scale to 0.5, which Buddy does"),
        ({"llama__logit_scale": 8.0}, "sets llama.logit_scale to 8.0"),
        ({"llama__attention__sliding_window": 16}, "sets llama.attention.sliding_window to 16"),
        ({"llama__final_logit_softcapping": 30.0}, "sets llama.final_logit_softcapping to 30.0"),
        ({"llama__attention__causal": False}, "sets llama.attention.causal to False"),
        ({"llama__pooling_type": 3}, "sets llama.pooling_type to 3"),
        ({"llama__rope__freq_base_swa": 1e4}, "sets llama.rope.freq_base_swa"),
        ({"general__sampling__mirostat": 2}, "sets general.sampling.mirostat to 2, which Buddy"),
        ({"general__sampling__sequence": "edskypmxt"}, "sets general.sampling.sequence to edsk"),
        ({"general__sampling__temp": "hot"}, "sets general.sampling.temp to hot"),
        ({"general__sampling__top_p": 5.0}, "sets general.sampling.top_p to 5.0"),
        ({"general__sampling__top_k": 40.5}, "sets general.sampling.top_k to 40.5"),
        ({"llama__context_length": None}, "says nothing of llama.context_length"),
        (
            {"llama__attention__layer_norm_rms_epsilon": None},
            "says nothing of llama.attention.layer_norm_rms_epsilon",
        ),
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
