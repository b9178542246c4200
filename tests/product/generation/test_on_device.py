"""What `generate` takes, on a GPU, pretended or real: no mixed devices, and the CPU's tokens."""

import json

import pytest
import torch

from buddy import BuddyForCausalLM, DepthTrace
from buddy.depth.prior import Prior
from tests.gpu import assert_same, is_real, is_there, move, on_gpu
from tests.methods.adainfer.test_policy import adaptive
from tests.product.generation.test_exit_drafts import exits_at_once
from tests.product.generation.test_ledger_budget import with_ledger
from tests.product.policies.made import gated, random_pudding
from tests.tiny import (
    KV_POLICIES,
    padded,
    random_ids,
    tiny_buddy,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("gpu")
PROMPTS, MASK = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")
ROWS = {"inputs": PROMPTS, "attention_mask": MASK}
ALONE = {"inputs": PROMPTS[1:2]}


def on_both(make, work, *, draws=False):
    """What the work gives of the model on the CPU, and of one that is on the device.

    A real device draws other numbers: what `draws` is compared with the device itself.
    """
    buddy, twin = make(), make()
    torch.manual_seed(0)
    expected = work(move(twin) if draws and is_real() else twin)
    with on_gpu():
        torch.manual_seed(0)
        made = work(move(buddy))
    return expected, made


def assert_same_tokens(make, new_tokens=3, **options):
    def work(buddy):
        trace = DepthTrace()
        out = buddy.generate(**options, max_new_tokens=new_tokens, trace=trace)
        return out, [step.plans for step in trace.steps]

    draws = options.get("do_sample", False)
    (expected, ran), (made, ran_there) = on_both(make, work, draws=draws)
    assert is_there(made)
    assert made.tolist() == expected.tolist()
    assert ran_there == ran


def general(**options):
    return lambda: tiny_buddy(engine="general", **options)


FORMS = {
    "mean": (lambda: with_ledger(engine="general"), ROWS | {"budget": "mean:0.75"}),
    "auto": (general(predictor=True), ROWS | {"budget": ["auto", 0.6, "auto"]}),
    "counts": (general(), ROWS | {"budget": torch.tensor([3, 4, 6])}),
    "phases": (general(), ROWS | {"budget": 0.5, "prefill_budget": 0.8}),
    "every-other-step": (general(), ROWS | {"budget": 0.7, "reroute": 2}),
    "sampled": (general(), ROWS | {"budget": 0.7, "do_sample": True, "top_p": 0.9}),
    "shared-sampled": (
        general(),
        ROWS | {"budget": 0.7, "do_sample": True, "batch_route": "shared"},
    ),
    "penalties": (
        general(),
        ROWS | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
    ),
    "ends": (
        general(),
        ROWS | {"budget": 0.7, "eos_token_id": list(range(2, 60)), "pad_token_id": 0},
    ),
    "beams": (general(), ROWS | {"budget": [0.5, 0.7, 1.0], "num_beams": 2, "length_penalty": 2.0}),
    "several-beams": (
        general(predictor=True),
        ALONE | {"budget": "auto", "num_beams": 3, "num_return_sequences": 2},
    ),
    "several": (
        general(),
        ROWS | {"budget": 0.7, "do_sample": True, "num_return_sequences": 2},
    ),
    "guided": (general(), ALONE | {"guidance_scale": 1.5}),
    "drafts": (general(), ALONE | {"draft_budget": 0.5}),
    "row-drafts": (general(), ROWS | {"budget": [0.7, 0.8, 1.0], "drafts": "ngram+0.5"}),
    "sampled-drafts": (general(), ALONE | {"draft_budget": 0.5, "do_sample": True}),
    "exit-drafts": (
        lambda: exits_at_once(engine="general"),
        ALONE | {"draft_budget": "3 blocks"},
    ),
    "sampled-exit-drafts": (
        lambda: exits_at_once(engine="general"),
        ALONE | {"draft_budget": "3 blocks", "do_sample": True},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_budget_and_decoding(form, long_drafts):
    make, options = FORMS[form]
    assert_same_tokens(make, **({"do_sample": False} | options))


@pytest.mark.parametrize("kv_policy", KV_POLICIES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # with and without a sliding window
def test_each_kv_policy(family, kv_policy):
    options = ROWS | {"budget": [0.5, 0.7, 0.9], "prefill_budget": 0.8, "do_sample": False}
    assert_same_tokens(
        lambda: tiny_buddy(family, engine="general", kv_policy=kv_policy), 2, **options
    )


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "granite", "mixtral", "qwen3_moe", "phi3"]
)
def test_peculiar_families(family):
    assert_same_tokens(general(name=family), 2, **ROWS, budget=0.7, do_sample=False)


PLANNERS = [
    {"context": "key", "context_layer": 2},
    {"context": "key+value", "context_layer": 3, "summary": "mean+last"},
    {"summary": "ema"},
    {"pool": "scores"},
]


@pytest.mark.parametrize(
    "planner", PLANNERS, ids=lambda planner: "-".join(map(str, planner.values()))
)
def test_each_way_to_sum_a_context_up(planner):
    assert_same_tokens(
        general(predictor=True, **planner), 3, **ROWS, do_sample=False, budget=["auto", 0.7, 4 / 6]
    )


def with_policy(spec, **parts):
    def make():
        model = tiny_model()
        return BuddyForCausalLM(model, policy=spec, engine="general", **parts)

    return make


def with_prior():
    return with_policy("static", prior=Prior(torch.tensor([0.4, 0.1, 0.3, 0.2])))()


POLICIES = {
    "full": with_policy("full"),
    "random": with_policy("random:3"),
    "static": with_policy("static:2,3,4,1"),
    "prior": with_prior,
    "layerskip": with_policy("layerskip"),
    "pudding": lambda: with_policy("pudding", learned=random_pudding())(),
    "adainfer": lambda: adaptive(engine="general"),
    **{
        method: lambda method=method: gated(method, engine="general")
        for method in ("d-llm", "dash", "first", "flexidepth", "mixture-of-depths")
    },
}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy(policy):
    keeps_budget = policy in ("random", "static", "prior", "layerskip", "pudding")
    budget = {"budget": 4 / 6} if keeps_budget else {}
    assert_same_tokens(POLICIES[policy], 3, **ROWS, **budget, do_sample=False)


def test_sets_that_were_searched(tmp_path):
    record = tmp_path / "sets.json"
    results = {"sets": {"3": [0, 4, 5], "5": [0, 1, 2, 3, 5]}, "removal_order": [4, 1, 3, 2]}
    record.write_text(json.dumps({"kind": "searched", "config": {}, "results": results}))
    make = with_policy(f"searched:{record}")
    assert_same_tokens(make, 3, **ROWS, budget=["3 blocks", "4 blocks", "5 blocks"])


class Tokens:
    """A streamer, and what it is given."""

    def __init__(self):
        self.got = []

    def put(self, ids):
        self.got += ids.flatten().tolist()

    def end(self):
        self.got.append("end")


@pytest.mark.parametrize("form", [{}, {"draft_budget": 0.5}], ids=["plain", "drafts"])
def test_a_streamer_is_given_the_tokens(form, long_drafts):
    def work(buddy):
        streamer = Tokens()
        buddy.generate(**ALONE, **form, max_new_tokens=4, do_sample=False, streamer=streamer)
        return streamer.got

    expected, made = on_both(general(), work)
    assert made == expected


@pytest.mark.parametrize("form", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_scores_come_back_where_the_model_is(form):
    options = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}

    def work(buddy):
        out = buddy.generate(**ROWS, **form, **options, budget=0.7, max_new_tokens=3)
        return torch.stack(out.scores), out.sequences

    (expected, tokens), (made, tokens_there) = on_both(general(), work)
    assert is_there(made)
    assert tokens_there.tolist() == tokens.tolist()
    # atol: buffers of another length, so another order of sums.
    assert_same(made.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_policy", KV_POLICIES)
def test_a_session_is_gone_on_from(kv_policy):
    first, more = random_ids(2, 5), random_ids(2, 2, seed=7)

    @torch.no_grad()
    def work(buddy):
        out = buddy(first, budget=[0.5, 0.8])
        out = buddy(more, cache=out.cache, budget=0.7)
        whole = torch.cat([first, more], 1)
        made = buddy.generate(
            torch.cat([whole, random_ids(2, 1)], 1), cache=out.cache, max_new_tokens=2
        )
        return out.logits.cpu(), made.tolist()

    (expected, tokens), (made, tokens_there) = on_both(general(kv_policy=kv_policy), work)
    assert tokens_there == tokens
    assert_same(made, expected)
