"""A model and a session can be copied, pickled and moved, used or not, and copies share nothing."""

import copy
import io
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import quantise_backbone
from tests.product.engine.test_lanes import needs_cc
from tests.tiny import every_kv_policy, random_ids, tiny_buddy, tiny_model

every_engine = pytest.mark.parametrize(
    "engine", ["general", pytest.param("native", marks=needs_cc)]
)
IDS = random_ids(1, 7)
OPTIONS = {"budget": "3 blocks", "max_new_tokens": 10, "do_sample": False}


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


every_way = pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved],
    ids=["deepcopy", "pickle", "save"],
)


def tabled(engine):
    """A model whose plans come from a token table, so that it has one once it is used."""
    return tiny_buddy(engine=engine, summary="ema", ema_decay=0.5)


def tensors(model):
    """Every tensor that a model's attributes hold, tables and priors too."""
    router = (*model.router.parameters(), *model.router.buffers())
    return [*model.model.parameters(), *model.model.buffers(), *router]


@every_engine
@every_way
def test_a_used_model_is_copied_whole_and_shares_nothing(engine, way):
    model = tabled(engine)
    written = model.generate(IDS, **OPTIONS)
    made = way(model)
    assert made.executor.engine == engine
    assert torch.equal(made.generate(IDS, **OPTIONS), written)
    with torch.no_grad():
        for tensor in tensors(made):
            tensor.zero_()
    assert torch.equal(model.generate(IDS, **OPTIONS), written)
    made.config.vocab_size, made.generation_config.max_length = 1, 1
    assert model.config.vocab_size != 1
    assert model.generation_config.max_length != 1
    made.set_policy("random:1")
    assert model.policy.name == "routed"


@every_way
def test_what_is_made_at_first_use_is_not_copied(way):
    model = tabled("auto")
    before = len(pickle.dumps(model))
    model.generate(IDS, **OPTIONS)
    assert len(pickle.dumps(model)) == before
    assert not way(model).executor._made


@every_way
@pytest.mark.parametrize("kind", ["adapter", "quantised"])
def test_adapters_and_quantised_weights_are_copied_too(way, kind):
    hf_model = tiny_model()
    if kind == "adapter":
        hf_model = get_peft_model(
            hf_model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        )
    model = BuddyForCausalLM(hf_model, policy="random:1")
    if kind == "quantised":
        quantise_backbone(model.backbone, "int8")
    written = model.generate(IDS, **OPTIONS)
    assert torch.equal(way(model).generate(IDS, **OPTIONS), written)


@every_engine
@every_kv_policy
@torch.no_grad()
def test_a_copied_session_goes_on_by_itself(engine, kv_policy):
    model = tiny_buddy(engine=engine, policy="random:1", kv_policy=kv_policy)
    prompt = model(IDS, budget="3 blocks").cache
    model(IDS[:, :1], budget="3 blocks", cache=prompt)
    made = copy.deepcopy(prompt)
    assert made.kv._project.__self__ is model.backbone

    def answer(session):
        """Blocks that were skipped now run, so that holes are closed."""
        steps = zip(random_ids(6, 1, seed=4), (4, 6, 3, 5, 6, 4), strict=True)
        return [
            model(token[None], budget=f"{blocks} blocks", cache=session).logits
            for token, blocks in steps
        ]

    copied = answer(made)
    assert (prompt.get_seq_length(), made.get_seq_length()) == (8, 14)
    assert_close(answer(prompt), copied, atol=0, rtol=0)


@every_engine
def test_weights_that_are_loaded_into_a_used_model_are_used(engine):
    model, other = tabled(engine), tabled(engine)
    model.generate(IDS, **OPTIONS)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    fresh = tabled(engine)
    fresh.load_state_dict(other.state_dict())
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(model.generate(IDS, **OPTIONS), fresh.generate(IDS, **OPTIONS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_used_model_changes_its_number_format(dtype):
    model = tabled("auto")
    model.generate(IDS, **OPTIONS)
    moved = model.to(dtype)
    assert moved is model
    assert moved.dtype == dtype
    assert {p.dtype for p in moved.router.parameters()} == {torch.float32}
    fresh = tabled("auto").to(dtype)
    assert torch.equal(moved.generate(IDS, **OPTIONS), fresh.generate(IDS, **OPTIONS))


def test_half_eval_and_train_are_torchs_own():
    model = tabled("auto").half()
    assert model.dtype == torch.float16
    assert not model.eval().training
    assert model.train().model.training
    assert model.generate(IDS, **OPTIONS).shape == (1, 17)
