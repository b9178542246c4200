"""On real rows and the real model: full depth through our class is lm-eval's own `hf` class."""

from pathlib import Path

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.hub.presets import DEFAULT_MODEL
from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.evaluation.tasks.harness import BuddyLM
from buddy.lab.evaluation.tasks.loading import load_tasks

DATA = Path(__file__).parents[3] / "shared" / "data"
ROWS = 1

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not DATA.is_dir(), reason="the benchmark data is not here"),
]


def test_full_depth_equals_lm_evals_own_class_on_the_eight_tasks():
    model = BuddyForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32, policy="full")
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    loaded = load_tasks(list(COMMONSENSE), data_dir=DATA, limit=ROWS)
    ours, theirs = (
        evaluate(lm, loaded, limit=ROWS, bootstrap_iters=0)
        for lm in (
            BuddyLM(model, tokenizer=tokenizer),
            HFLM(model.model, tokenizer=tokenizer, batch_size=4),
        )
    )
    assert ours["results"] == theirs["results"]
    for task in COMMONSENSE:
        for mine, yours in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            for (a, greedy), (b, also) in zip(
                mine["filtered_resps"], yours["filtered_resps"], strict=True
            ):
                # atol: sums over the answer's logits, each up to 30, in another order.
                assert a == pytest.approx(b, abs=2e-3)
                assert greedy == also
