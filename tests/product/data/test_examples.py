"""Rows become tokens as the model's own conversations are: how they begin, and what ends them."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from buddy.cli.chat_session import ChatSession
from buddy.data.examples import Source, read_examples
from buddy.generation.options import end_at_turns
from buddy.serving.http.prompts import PromptReader

GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<s>[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "<s>{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
THINKING = CHATML.replace(
    "{% endif %}", "{% if enable_thinking is false %}w9 {% endif %}{% endif %}"
).replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
NO_END = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
SPECIAL = ("<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>")


def tokenizer(template=None, *, begins=False):
    """Words of letters and digits, and special tokens of which all but two are declared alone."""
    words = [*SPECIAL, "<|eot_id|>", "<unk>", *(f"w{i}" for i in range(20)), "[", "]", "INST"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([AddedToken(name) for name in (*SPECIAL, "<|eot_id|>")])
    if begins:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def example(tmp_path, row, made, template="chat"):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    source = Source(path=str(path), template=template)
    (only,) = read_examples(source, made, max_tokens=64)
    return tuple(made.convert_ids_to_tokens(ids) for ids in (only.prompt, only.answer))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (GEMMA, "<end_of_turn>"),
        (CHATML, "<|im_end|>"),
        (LLAMA_2, "</s>"),
        (LLAMA_3, "<|eot_id|>"),
        (THINKING, "<|im_end|>"),
        (NO_END, "</s>"),
    ],
)
def test_an_answer_ends_as_the_template_ends_a_turn(tmp_path, template, end):
    row = {"instruction": "w1", "output": "w2 w3"}
    assert example(tmp_path, row, tokenizer(template))[1] == ["w2", "w3", end]


def test_an_answer_in_no_template_of_the_models_ends_as_a_text_does(tmp_path):
    made = tokenizer(GEMMA)
    row = {"instruction": "w1", "output": "w2"}
    assert example(tmp_path, row, made, "alpaca")[1] == ["w2", "</s>"]
    row = {"prompt": "w1", "completion": " w2"}
    assert example(tmp_path, row, made)[1] == ["w2"]


def test_a_text_that_writes_its_beginning_has_it_once(tmp_path):
    made = tokenizer(begins=True)
    begun = {"prompt": "<s>[INST] w1 [/INST]", "completion": " w2</s>"}
    plain = begun | {"prompt": "[INST] w1 [/INST]"}
    expected = (["<s>", "[", "INST", "]", "w1", "[", "<unk>", "]"], ["w2", "</s>"])
    found, of_plain = example(tmp_path, begun, made), example(tmp_path, plain, made)
    assert found == of_plain
    assert found[0][:5] == expected[0][:5]
    assert found[1] == expected[1]
    twice = begun | {"prompt": "<s><s> w1"}  # as it is written, for a tokenizer that adds none
    assert example(tmp_path, twice, tokenizer())[0] == ["<s>", "<s>", "w1"]
    texts = ["<s> w1", "w1", "<s><s> w1"]
    ids = PromptReader(made).prompts(texts)
    assert ids[0] == ids[1] == (0, made.convert_tokens_to_ids("w1"))
    session = object.__new__(ChatSession)
    session.tokenizer = made
    for text, asked in zip(texts, ids, strict=True):
        assert session.prompt_ids([{"content": text}], raw=True).tolist() == [list(asked)]


@pytest.mark.parametrize("ends", [None, 1, [1, 3]])
@pytest.mark.parametrize("template", [GEMMA, NO_END, None, "{{ 1 / 0 }}"])
def test_answers_end_where_they_are_trained_to(ends, template):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))
    end_at_turns(model, tokenizer(template))
    if template == GEMMA:
        expected = [3] if ends is None else [1, 3]  # <end_of_turn>
        assert model.generation_config.eos_token_id == expected
    else:
        assert model.generation_config.eos_token_id == ends
