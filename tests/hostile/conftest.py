"""A whole model folder and a whole checkpoint, to be copied and spoilt."""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from buddy import BuddyForCausalLM
from tests.hostile.folders import word_tokenizer
from tests.tiny import random_predictor, random_router, tiny_model


@pytest.fixture(scope="package")
def whole_model(tmp_path_factory):
    """A Hugging Face folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    tiny_model().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def whole_checkpoint(tmp_path_factory):
    """A Buddy checkpoint with all that one can have: `base` and `checkpoint` beside each other."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_model().save_pretrained(folder / "base")
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    prior = torch.tensor([0.3, -0.4, 1.2, -1.1])
    router = random_router(tiny_model(), prior=prior)
    buddy = BuddyForCausalLM(
        model.eval(), router=router, predictor=random_predictor(router), prior=prior
    )
    buddy.save_pretrained(folder / "checkpoint", tokenizer=word_tokenizer())
    return folder / "checkpoint"


@pytest.fixture
def model_folder(whole_model, tmp_path):
    """A copy of the whole model."""
    return shutil.copytree(whole_model, tmp_path / "model")


@pytest.fixture
def checkpoint(whole_checkpoint, tmp_path):
    """A copy of the whole checkpoint."""
    return shutil.copytree(whole_checkpoint, tmp_path / "checkpoint")
