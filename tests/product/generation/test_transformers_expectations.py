"""What users of transformers expect of a model works, as at full depth there, or is refused."""

import functools
import logging
import threading

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch.testing import assert_close
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from buddy import BuddyForCausalLM, DepthTrace
from buddy.errors import ModelError, PolicyError, PromptError
from tests.product.engine.test_lanes import needs_cc
from tests.tiny import VOCAB, padded, random_ids, random_router, tiny_buddy, tiny_model

every_engine = pytest.mark.parametrize(
    "engine", ["general", pytest.param("native", marks=needs_cc)]
)
IDS = random_ids(1, 7)
BATCH, MASK = padded([random_ids(1, n, seed=n)[0] for n in (4, 9, 6)], "left")
CHARACTERS = ["<pad>", "<bos>", "<eos>", *map(chr, range(33, 127))]
GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 8, "do_sample": True}


def twins(engine="general", **options):
    """A transformers model, and another one of the same weights under Buddy."""
    return tiny_model(), buddy_of(engine, **options)


def buddy_of(engine="general", **options):
    model = tiny_model()
    return BuddyForCausalLM(model, router=random_router(model), engine=engine, **options)


def characters():
    """A tokenizer whose every character is a token."""
    made = Tokenizer(models.BPE({text: at for at, text in enumerate(CHARACTERS)}, []))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


shared_twins = functools.cache(twins)
"""What tests use that change nothing about it."""


def seeded(model, ids, options):
    torch.manual_seed(0)
    return model.generate(ids, **options)


WRITTEN = tiny_model().generate(IDS, **GREEDY)[0, 7:].tolist()
"""What full depth writes; some of it is made to end the text."""


class Raised(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + 3 * (torch.arange(VOCAB) == 5)


class AtColumn(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 11)


class AtThirds(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 3 == 0


STOP = {"stop_strings": [CHARACTERS[WRITTEN[3]]], "tokenizer": characters()}
WORKS = {
    "greedy": GREEDY,
    "a generation config": {"generation_config": GenerationConfig(**GREEDY)},
    "scores and logits": {
        **GREEDY,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    },
    "sampling": {**SAMPLED, "temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "typical sampling": {**SAMPLED, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "several sequences": {**SAMPLED, "num_return_sequences": 3},
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "scores of beams": {
        **GREEDY,
        "num_beams": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "sampled beams": {**SAMPLED, "num_beams": 3},
    "stop strings": {**GREEDY, **STOP},
    "stop strings in a config": {
        "generation_config": GenerationConfig(**GREEDY, stop_strings=STOP["stop_strings"]),
        "tokenizer": STOP["tokenizer"],
    },
    "stop strings and scores": {
        **GREEDY,
        **STOP,
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "stop strings and beams": {**GREEDY, **STOP, "num_beams": 2},
    "a tokenizer that is not needed": {**GREEDY, "tokenizer": STOP["tokenizer"]},
    "logits processors": {**GREEDY, "logits_processor": [Raised()]},
    "stopping criteria": {**GREEDY, "stopping_criteria": [AtColumn()]},
    "criteria that end one row": {**GREEDY, "stopping_criteria": [AtThirds()]},
    "the same with an end of text": {
        **GREEDY,
        "stopping_criteria": [AtThirds()],
        "eos_token_id": WRITTEN[3],
    },
    "a length in all": {"max_length": 14, "do_sample": False},
    "a long time": {**GREEDY, "max_time": 600.0},
    "no time": {**GREEDY, "max_time": 1e-9},
    "least new tokens": {**GREEDY, "min_new_tokens": 6, "eos_token_id": WRITTEN[3]},
    "least length": {**GREEDY, "min_length": 12, "eos_token_id": WRITTEN[3]},
    "repetition": {**GREEDY, "repetition_penalty": 1.7, "encoder_repetition_penalty": 1.2},
    "n-grams": {**GREEDY, "no_repeat_ngram_size": 1},
    "bad words": {**GREEDY, "bad_words_ids": [[WRITTEN[3]], [2, WRITTEN[4]]]},
    "forced and suppressed": {**GREEDY, "forced_eos_token_id": 9, "suppress_tokens": WRITTEN[:1]},
    "a bias": {**GREEDY, "sequence_bias": [[[5], 3.0]]},
    "ends of text": {**GREEDY, "eos_token_id": [WRITTEN[3], WRITTEN[7]]},
    "ends of text, no pad": {**GREEDY, "eos_token_id": WRITTEN[3], "pad_token_id": None},
    "allowed tokens": {**GREEDY, "prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5]},
    "a watermark": {**GREEDY, "watermarking_config": {"greenlist_ratio": 0.5}},
    "a cache that grows": {**GREEDY, "cache_implementation": "dynamic", "use_cache": True},
    "not compiled": {**GREEDY, "disable_compile": True},
    "a float mask": {**GREEDY, "attention_mask": MASK.float()},
}


@every_engine
@pytest.mark.parametrize("case", WORKS)
def test_at_full_depth_it_is_what_transformers_gives(case, engine):
    theirs, ours = shared_twins(engine)
    options = {"attention_mask": MASK, **WORKS[case]}
    expected, made = seeded(theirs, BATCH, options), seeded(ours, BATCH, options)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(made, expected)
        return
    assert type(made) is type(expected)
    assert made.keys() == expected.keys()
    assert torch.equal(made.sequences, expected.sequences)
    for name in expected.keys() - {"sequences", "cache"}:
        # atol: other orders of sums; minus infinity is equal to itself.
        assert_close(made[name], expected[name], atol=1e-4, rtol=1e-4)


@every_engine
@pytest.mark.parametrize("case", WORKS)
def test_below_full_depth_every_token_runs_the_budget(case, engine):
    trace = DepthTrace()
    options = {**WORKS[case], "attention_mask": MASK}
    seeded(shared_twins(engine)[1], BATCH, {**options, "budget": "3 blocks", "trace": trace})
    assert {blocks for step in trace.steps for blocks in step.executed} <= {0, 3}
    assert trace.steps[0].executed[0] == 3
    assert set(trace.finish_reasons) <= {"stop", "length"}


FUNCTION_OF_THE_CALLER = {"custom_generate": lambda model, input_ids, **inputs: input_ids + 1}
DRAFTS = "Buddy drafts from the text itself"
REFUSED = {
    "inputs_embeds": (torch.zeros(1, 7, 32), "blocks are chosen from token ids"),
    "position_ids": (torch.arange(7)[None] * 2, "positions follow from attention_mask"),
    "cache_position": (torch.arange(7), "positions follow"),
    "token_type_ids": (torch.zeros_like(IDS), "has token types"),
    "labels": (IDS, "is what forward computes"),
    "cache": (DynamicCache(), "is a DynamicCache"),
    "use_cache": (False, "plans of earlier tokens live in the cache"),
    "cache_implementation": ("static", "the cache is a session"),
    "cache_config": ({"backend": "quanto"}, "the cache is a session"),
    "compile_config": (CompileConfig(), "compiled code of their own"),
    "assistant_model": (tiny_model(), DRAFTS),
    "assistant_tokenizer": (STOP["tokenizer"], DRAFTS),
    "assistant_early_exit": (2, DRAFTS),
    "prompt_lookup_num_tokens": (3, DRAFTS),
    "use_mtp": (True, DRAFTS),
    "token_healing": (True, "model.heal_tokens"),
    "penalty_alpha": (0.6, "contrastive search"),
    "dola_layers": ("low", "DoLa"),
    "force_words_ids": ([[5]], "constrained beams"),
    "num_beam_groups": (2, "group beams"),
    "custom_generate": ("some/repository", "pass a function"),
    "trust_remote_code": (True, "Buddy runs none"),
    "generation_config": ({"max_new_tokens": 3}, "got a dict"),
    "attention_mask": (torch.ones(1, 1, 7, 7), "attention_mask has shape"),
    "buget": (0.5, "takes no buget: expected options of Buddy .*, budget, "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_nothing_here_is_refused_in_one_line(name):
    value, words = REFUSED[name]
    with pytest.raises((PolicyError, PromptError), match=words) as caught:
        shared_twins()[1].generate(IDS, **{"do_sample": False, "num_beams": 1, name: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, "expected a tensor of ids .*, got none"),
        ([[3, 4]], "got list"),
        (characters()("abc", return_tensors="pt"), r"got BatchEncoding; pass \*\*tokenizer"),
        (IDS[0], r"got int64 of shape \[7\]"),
        (IDS.float(), "got float32"),
        (IDS[:, :0], r"of shape \[1, 0\]"),
        (IDS + VOCAB, "is not one of the model's 97"),
        (-IDS, "is not one of the model's 97"),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(ids, words):
    with pytest.raises(PromptError, match=words):
        shared_twins()[1].generate(input_ids=ids, **GREEDY)


def test_a_prompt_that_comes_twice_is_refused():
    with pytest.raises(PromptError, match="pass one of them"):
        buddy_of().generate(IDS, input_ids=IDS)


def test_ids_under_pads_may_be_anything():
    hostile = BATCH.masked_fill(MASK == 0, -100)
    made = buddy_of().generate(hostile, attention_mask=MASK, **GREEDY)
    assert torch.equal(
        made[:, 9:], buddy_of().generate(BATCH, attention_mask=MASK, **GREEDY)[:, 9:]
    )


def test_a_budget_inside_a_generation_config_is_refused():
    with pytest.raises(PolicyError, match="no budget: pass it to generate itself"):
        buddy_of().generate(IDS, generation_config=GenerationConfig(budget=0.5))


def test_guidance_works_at_full_depth_and_takes_no_budget():
    theirs, ours = twins()
    options = {**GREEDY, "guidance_scale": 1.5}
    assert torch.equal(ours.generate(IDS, **options), theirs.generate(IDS, **options))
    with pytest.raises(PolicyError, match="a budget does not reach"):
        ours.generate(IDS, budget=0.5, **options)


def test_a_loop_of_the_callers_is_called():
    made = buddy_of().generate(IDS, budget=0.5, **GREEDY, **FUNCTION_OF_THE_CALLER)
    assert torch.equal(made, IDS)  # the prompt's columns come back as they were given


def test_options_of_the_models_own_config_count_beside_a_callers_config():
    for option in (
        {"num_beams": 3},
        {"return_dict_in_generate": True, "output_scores": True},
        {"max_length": 12},
        {"eos_token_id": WRITTEN[3]},
    ):
        made = []
        for model in twins():
            model.generation_config.update(**option)
            given = {"max_new_tokens": 12} if "max_length" not in option else {}
            made.append(model.generate(IDS, generation_config=GenerationConfig(**given)))
        theirs, ours = made
        assert type(ours) is type(theirs), option
        assert torch.equal(getattr(ours, "sequences", ours), getattr(theirs, "sequences", theirs))


def test_none_as_an_option_undoes_what_the_model_says():
    theirs, ours = twins()
    for model in (theirs, ours):
        model.generation_config.eos_token_id = WRITTEN[3]
    options = {**GREEDY, "eos_token_id": None}
    assert torch.equal(ours.generate(IDS, **options), theirs.generate(IDS, **options))
    assert ours.generate(IDS, **options).shape == (1, 19)


def test_pads_are_those_of_the_options_where_there_is_no_mask():
    theirs, ours = twins()
    ids = BATCH.masked_fill(MASK == 0, 5)
    options = {**GREEDY, "pad_token_id": 5, "eos_token_id": 1}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


@every_engine
def test_a_conversation_goes_on_from_its_session(engine):
    theirs, ours = twins(engine)
    for options in (GREEDY, {**GREEDY, "num_beams": 1, "do_sample": True, "top_k": 1}):
        made = []
        for model in (theirs, ours):
            first = model.generate(IDS, return_dict_in_generate=True, **options)
            ids = torch.cat([first.sequences, random_ids(1, 3, seed=5)], 1)
            made.append(model.generate(ids, cache=first.cache, **options))
        assert torch.equal(*made)


@every_engine
@pytest.mark.parametrize(("budget", "batch_route"), [(1.0, "independent"), ("4 blocks", "shared")])
@pytest.mark.parametrize("is_dict", [False, True])
def test_a_batch_whose_rows_end_apart_goes_on_from_its_session(
    engine, budget, batch_route, is_dict
):
    buddy = tiny_buddy(policy="static:1,2,3,4")
    buddy.executor.engine = engine
    options = {**GREEDY, "budget": budget, "batch_route": batch_route, "pad_token_id": 0}
    free = buddy.generate(BATCH, attention_mask=MASK, **options)[:, BATCH.shape[1] :].tolist()
    end = next(token for row in free for token in row[1:9] if any(token not in o for o in free))
    options["eos_token_id"] = end
    alone = buddy.generate(BATCH, attention_mask=MASK, **options)
    session, trace = buddy.new_session(len(BATCH), 32), DepthTrace()
    options |= {"cache": session, "return_dict_in_generate": is_dict, "trace": trace}
    out = buddy.generate(BATCH, attention_mask=MASK, **options)
    out = out.sequences if is_dict else out
    assert torch.equal(out, alone)
    assert 0 < int((out[:, -1] == 0).sum()) < len(out)  # rows that were filled up
    ids = torch.cat([out, random_ids(len(out), 3, seed=5)], 1)
    new = out[:, BATCH.shape[1] :]
    mask = torch.cat([MASK, (new != 0).long(), torch.ones(len(out), 3, dtype=torch.long)], 1)
    lengths = mask[:, : session.get_seq_length()].sum(1).tolist()
    assert [sequence.length for sequence in session.sequences.values()] == lengths
    blocks = 4 if budget == "4 blocks" else buddy.num_blocks
    assert [sequence.executed for sequence in session.sequences.values()] == [
        n * blocks for n in lengths
    ]
    fresh = buddy(ids, mask, budget=budget).logits[:, -1]
    unmasked = torch.ones_like(mask)
    for refused in (unmasked, torch.cat([MASK * 0, mask[:, BATCH.shape[1] :]], 1)):
        with pytest.raises(PromptError, match="attention_mask says that row"):
            buddy(ids[:, session.get_seq_length() :], refused, cache=session)
        with pytest.raises(PromptError, match="attention_mask says that row"):
            buddy.generate(ids, attention_mask=refused, cache=session)
    more = buddy(ids[:, session.get_seq_length() :], mask, cache=session, budget=budget)
    # atol: the cache changes the order of sums.
    assert_close(more.logits[:, -1], fresh, atol=1e-4, rtol=1e-4)


@every_engine
def test_a_streamer_is_read_while_another_thread_generates(engine):
    ours, tokenizer = buddy_of(engine), characters()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {"budget": 0.5, **GREEDY}
    thread = threading.Thread(
        target=ours.generate, kwargs={"input_ids": IDS, "streamer": streamer, **options}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(ours.generate(IDS, **options)[0, 7:])


@every_engine
@pytest.mark.parametrize("options", [{}, {"budget": "3 blocks"}, {"num_beams": 2}])
def test_a_full_context_is_told(engine, caplog, options):
    trace = DepthTrace()
    with caplog.at_level(logging.WARNING, logger="buddy"):
        out = buddy_of(engine).generate(
            random_ids(1, 60), max_new_tokens=10**9, trace=trace, **options
        )
    assert out.shape == (1, 65)  # the token after a full context is predicted, but not fed
    assert trace.finish_reasons == ("context",)
    assert trace.to_json()["finish_reasons"] == ["context"]
    assert trace.context == 64
    assert "stopped after 5 new tokens: the context of 64 tokens is full" in caplog.text


@pytest.mark.parametrize("options", [{}, {"max_length": 90}, {"max_new_tokens": 20}])
def test_a_prompt_that_fills_the_context_has_one_answer(options, caplog):
    out = buddy_of().generate(random_ids(1, 64), do_sample=False, **options)
    assert out.shape == (1, 65)
    assert "the context of 64 tokens is full" in caplog.text


def test_each_sequence_has_its_reason():
    trace = DepthTrace()
    ours = buddy_of()
    plain = ours.generate(BATCH, attention_mask=MASK, **GREEDY)
    end = next(token for token in plain[0, 9:].tolist() if token not in plain[1:, 9:])
    ours.generate(BATCH, attention_mask=MASK, eos_token_id=end, trace=trace, **GREEDY)
    assert trace.finish_reasons == ("stop", "length", "length")
    ours.generate(IDS, stopping_criteria=[AtColumn()], trace=trace, **GREEDY)
    assert trace.finish_reasons == ("stop",)
    ours.generate(IDS, draft_budget="3 blocks", trace=trace, max_new_tokens=4, do_sample=False)
    assert trace.finish_reasons == ("length",)


@every_engine
@torch.no_grad()
def test_forward_is_that_of_transformers(engine):
    theirs, ours = twins(engine)
    expected = theirs(BATCH, MASK, labels=BATCH)
    made = ours(BATCH, MASK, labels=BATCH)
    assert_close(made.logits[MASK.bool()], expected.logits[MASK.bool()])
    assert list(made.keys()) == ["loss", "logits", "cache"]
    assert_close(ours(IDS, labels=IDS).loss, theirs(IDS, labels=IDS).loss)
    assert_close(
        ours(IDS, labels=IDS, num_items_in_batch=11).loss,
        theirs(IDS, labels=IDS, num_items_in_batch=11).loss,
    )
    assert_close(ours(IDS, return_dict=False)[0], theirs(IDS, return_dict=False)[0])
    some = torch.tensor([1, 4])
    assert_close(ours(IDS, logits_to_keep=some).logits, theirs(IDS, logits_to_keep=some).logits)
    with torch.inference_mode():
        assert_close(ours(IDS).logits, theirs(IDS).logits)
        own = theirs(IDS).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The native engine computes in the weights' own format.
        assert_close(ours(IDS).logits, own if engine == "native" else theirs(IDS).logits)
        assert torch.equal(ours.generate(IDS, **GREEDY), theirs.generate(IDS, **GREEDY))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"inputs_embeds": torch.zeros(1, 7, 32)}, "chosen from token ids"),
        ({"position_ids": torch.arange(7)[None]}, "positions follow"),
        ({"output_hidden_states": True}, "use hooks"),
        ({"output_attentions": True}, "use hooks"),
        ({"cache": DynamicCache()}, "is a DynamicCache"),
        ({"labels": IDS, "logits_to_keep": 1}, "labels need all logits"),
        ({"buget": 0.5}, "is it misspelt"),
        ({"input_ids": None}, "expected input_ids"),
    ],
)
def test_forward_refuses_in_one_line(inputs, words):
    with pytest.raises((PolicyError, PromptError), match=words) as caught:
        shared_twins()[1](**{"input_ids": IDS, **inputs})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["output_attentions", "output_hidden_states", "position_ids"])
def test_forward_takes_what_says_nothing(option):
    buddy_of()(IDS, **{option: None})
    buddy_of()(IDS, **{option: False})


@torch.no_grad()
def test_a_session_is_taken_under_its_old_name_too():
    ours = shared_twins()[1]
    first = ours(IDS[:, :4])
    with pytest.warns(FutureWarning, match="Use `cache` instead"):
        made = ours(IDS[:, 4:], past_key_values=first.past_key_values)
    assert_close(made.logits, ours(IDS).logits[:, 4:])
    first = ours(IDS[:, :4])
    with pytest.warns(FutureWarning, match="Use `cache` instead"):
        made = ours.generate(IDS, past_key_values=first.cache, **GREEDY)
    assert torch.equal(made, ours.generate(IDS, **GREEDY))


@every_engine
def test_a_compiled_model_gives_what_it_gives(engine):
    ours = buddy_of(engine)
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        assert_close(compiled(IDS, budget=0.5).logits, ours(IDS, budget=0.5).logits)
    assert torch.equal(compiled.generate(IDS, **GREEDY), ours.generate(IDS, **GREEDY))


@every_engine
@pytest.mark.parametrize(
    ("texts", "options"),
    [
        ("abc", {}),
        (["abc", "defgh"], {"batch_size": 2}),
        ([{"role": "user", "content": "abc"}], {}),
        ("abc", {"stop_sequence": "Q", "return_full_text": False}),
        ("abc", {"num_beams": 2, "num_return_sequences": 2}),
    ],
)
def test_a_pipeline_runs_it(engine, texts, options, caplog):
    theirs, ours = (
        pipeline("text-generation", model=model, tokenizer=characters(), device="cpu")
        for model in twins(engine)
    )
    options = {"do_sample": False, "max_new_tokens": 6, **options}
    assert ours(texts, **options) == theirs(texts, **options)
    trace = DepthTrace()
    ours(texts, budget="3 blocks", trace=trace, **options)
    assert {blocks for step in trace.steps for blocks in step.executed} <= {0, 3}
    assert "not supported" not in caplog.text


@every_engine
def test_a_trainer_evaluates_and_predicts_with_it(engine, tmp_path):
    rows = [{"input_ids": ids, "labels": ids} for ids in random_ids(4, 9)]
    arguments = TrainingArguments(
        output_dir=tmp_path, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    theirs, ours = (
        Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        for model in twins(engine)
    )
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)
    made, expected = ours.predict(rows), theirs.predict(rows)
    assert_close(torch.from_numpy(made.predictions), torch.from_numpy(expected.predictions))


def test_the_names_that_tools_ask_for_are_there():
    theirs, ours = twins()
    assert ours.can_generate()
    assert not hasattr(ours, "hf_device_map")
    assert (ours.device, ours.dtype) == (theirs.device, theirs.dtype)
    assert ours.name_or_path == theirs.name_or_path
    assert ours.loss_type == theirs.loss_type
    assert ours.get_input_embeddings() is ours.model.get_input_embeddings()
    assert ours.get_output_embeddings() is ours.model.get_output_embeddings()
    wrapped = BuddyForCausalLM(theirs)
    assert wrapped.config is theirs.config
    assert wrapped.generation_config is theirs.generation_config
    assert wrapped.num_parameters() == theirs.num_parameters()
    without = {"exclude_embeddings": True}
    assert wrapped.num_parameters(**without) == theirs.num_parameters(**without)
    theirs.requires_grad_(False)
    assert wrapped.num_parameters(only_trainable=True) == 0


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("resize_token_embeddings", "change the transformers model first"),
        ("set_input_embeddings", "change the transformers model first"),
        ("set_attn_implementation", 'attention="sdpa"'),
        ("gradient_checkpointing_enable", "use smaller batches"),
        ("activation_checkpointing_enable", "use smaller batches"),
        ("generate_batch", "run_step"),
        ("push_to_hub", "save_pretrained"),
    ],
)
def test_what_would_go_past_the_wrapped_parts_is_refused(method, words):
    with pytest.raises(ModelError, match=words):
        getattr(shared_twins()[1], method)(1)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("policy", ["routed", "random:1", "full"])
def test_checkpointed_blocks_are_refused_whoever_turned_them_on(policy):
    ours = buddy_of(policy=policy)
    ours.model.gradient_checkpointing_enable()
    ours.train()
    with pytest.raises(ModelError, match="turn gradient checkpointing off"):
        ours(IDS, labels=IDS)
    ours.eval()
    ours(IDS, labels=IDS)


def test_it_is_no_assistant_of_another_model():
    with pytest.raises(PolicyError, match="a session is not cut from outside"):
        tiny_model().generate(IDS, assistant_model=buddy_of(), **GREEDY)


def test_healed_prompts_are_those_of_transformers():
    theirs, ours = twins()
    assert torch.equal(
        ours.heal_tokens(IDS.clone(), characters()), theirs.heal_tokens(IDS.clone(), characters())
    )
