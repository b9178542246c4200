"""What the model's makers say of generation is what a request has that names none of it."""

import sys
from unittest.mock import Mock

import httpx
import pytest
import torch
from transformers import GenerationConfig

from buddy.cli.main import main
from buddy.errors import ServingError
from buddy.serving.http.defaults import Defaults
from buddy.serving.request import Sampling
from buddy.serving.rows.engine import ServingThread
from tests.product.serving.serving import chat_tokenizer, served
from tests.tiny import tiny_buddy, tiny_model


def read(**wishes):
    return Defaults.read(GenerationConfig(**wishes))


def test_a_config_without_wishes_leaves_openais_defaults():
    assert read(eos_token_id=2, transformers_version="5.24.0") == Defaults(sampling=Sampling())
    neutral = GenerationConfig(
        **GenerationConfig._get_default_generation_params(), guidance_scale=1
    )
    assert Defaults.read(neutral).sampling == Sampling(temperature=0.0, top_k=50)


def test_wishes_are_followed_and_a_config_that_never_samples_is_greedy():
    wishes = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    assert read(**wishes, repetition_penalty=1.3, do_sample=True).sampling == Sampling(
        **wishes, repetition_penalty=1.3
    )
    assert read(do_sample=False).sampling.temperature == 0
    assert read(max_new_tokens=7, max_length=50).most_tokens(3, 16) == 7
    assert read(max_length=9).most_tokens(3, 16) == 6
    assert read(max_length=9).most_tokens(30, 16) == 1
    assert read(max_length=90).most_tokens(3, 16) == 16


@pytest.mark.parametrize(
    ("wish", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("suppress_tokens", [5]),
        ("bad_words_ids", [[5]]),
        ("min_new_tokens", 4),
        ("guidance_scale", 2.0),
        ("remove_invalid_values", True),
        ("typical_p", 0.5),
        ("repetition_penalty", 0.0),
        ("temperature", 3.0),
        ("top_k", 2.5),
        ("max_new_tokens", -1),
    ],
)
def test_what_a_server_does_not_do_is_refused_by_name(wish, value):
    config = GenerationConfig()
    setattr(config, wish, value)
    with pytest.raises(ServingError, match=f"generation_config asks for {wish}="):
        Defaults.read(config)


def test_serve_says_what_generate_says_under_a_repetition_penalty():
    model, tokenizer = tiny_buddy(), chat_tokenizer()
    ids = torch.tensor([[10, 11]])
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    model.generation_config.repetition_penalty = 1.5
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert not torch.equal(plain, expected)
    defaults = Defaults.read(model.generation_config)
    with served(
        ServingThread(model, tokenizer, "tiny"), tokenizer=tokenizer, defaults=defaults
    ) as running:
        body = {"prompt": [10, 11], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        for change, ids in (({}, expected), ({"repetition_penalty": 1}, plain)):
            reply = httpx.post(f"{running.url}/v1/completions", json=body | change, timeout=30)
            text = tokenizer.decode(ids[0, 2:], skip_special_tokens=True)
            assert reply.json()["choices"][0]["text"].split() == text.split()


def test_the_command_serves_with_the_wishes_and_the_ends_that_the_files_have(tmp_path, monkeypatch):
    model, tokenizer, served = tiny_model(), chat_tokenizer(), []
    model.generation_config.update(repetition_penalty=1.5, eos_token_id=7)
    model.save_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w5"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} w5 {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("buddy.serving.start.cost_of", Mock())
    monkeypatch.setattr("buddy.serving.start.Controller", Mock(return_value=None))
    monkeypatch.setattr(
        "buddy.serving.http.server.serve", lambda app, service, *_, **__: served.append(service)
    )
    monkeypatch.setattr(sys, "argv", ["buddy", "serve", str(tmp_path), "--port", "0"])
    with pytest.raises(SystemExit):
        main()
    [service] = served
    service.engine.close(5.0)
    assert service.defaults.sampling.repetition_penalty == 1.5
    assert service.engine._batcher._ends == {5, 7}
