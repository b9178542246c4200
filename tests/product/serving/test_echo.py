"""A prompt in its answer: its text, its scores, and what lm-eval makes of them over HTTP."""

import json

import httpx
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from buddy.engine.naive import naive_hidden
from buddy.engine.planned_prompt import plan_prompt
from buddy.lab.evaluation.tasks.harness import BuddyLM
from buddy.serving.http.bodies import CompletionBody
from buddy.serving.http.echo import echoes
from buddy.serving.http.prompts import PromptReader
from buddy.serving.rows.engine import ServingThread
from tests.product.serving.made import END, byte_buddy, byte_tokenizer, fallback_tokenizer
from tests.product.serving.serving import served

TEXTS = ("Hello, ë日🙂 he", "ab")


@pytest.fixture(scope="module")
def buddy():
    return byte_buddy(ends=END)


@pytest.fixture(scope="module")
def running(buddy):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    engine = ServingThread(buddy, tokenizer, "tiny")
    with served(engine, tokenizer=tokenizer) as running:
        yield running


def ask(running, path="completions", **body):
    body = {"temperature": 0, "max_tokens": 4, "budget": "4 blocks"} | body
    reply = httpx.post(f"{running.url}/v1/{path}", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply


def events(reply):
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@torch.no_grad()
def reference(buddy, ids, depth=4):
    """Log-probabilities [tokens - 1, vocabulary] of one forward of all ids under their plan."""
    ids = torch.tensor(ids)
    plan = torch.from_numpy(plan_prompt(buddy.inference_policy(), ids, depth).block_mask)
    hidden = naive_hidden(buddy.backbone, ids, plan.repeat(len(ids), 1), "lazy")
    return buddy.backbone.logits(hidden).log_softmax(-1)[:-1]


def ids_of(text):
    return byte_tokenizer()(text).input_ids


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_is_the_prompt_then_the_answer_whole_and_streamed(running, as_ids, logprobs):
    prompts = [ids_of(text) if as_ids else text for text in TEXTS]
    for prompt, texts in ((prompts, TEXTS), (prompts[0], TEXTS[:1])):
        body = {"prompt": prompt, "n": 2, "logprobs": logprobs, "seed": 1}  # routed by itself
        plain = ask(running, **body).json()["choices"]
        whole = ask(running, **body, echo=True).json()["choices"]
        assert len(whole) == 2 * len(texts)
        for place, (echoed, alone) in enumerate(zip(whole, plain, strict=True)):
            assert echoed["text"] == texts[place // 2] + alone["text"]
            assert echoed["finish_reason"] == alone["finish_reason"]
        parts = [[] for _ in whole]
        for chunk in events(ask(running, **body, echo=True, stream=True)):
            for part in chunk["choices"]:
                parts[part["index"]].append(part)
        for said, echoed, place in zip(parts, whole, range(9), strict=False):
            assert said[0]["text"].startswith(texts[place // 2])
            assert "".join(part["text"] for part in said) == echoed["text"]
            if logprobs is not None:
                told = [part["logprobs"] for part in said if part["logprobs"]]
                joined = {name: [x for one in told for x in one[name]] for name in told[0]}
                assert joined == echoed["logprobs"]


def test_echoed_logprobs_are_those_of_one_forward_and_point_into_the_text(running, buddy):
    made = ask(running, prompt=TEXTS[0], echo=True, logprobs=3).json()
    (choice,) = made["choices"]
    logprobs, ids = choice["logprobs"], ids_of(TEXTS[0])
    expected, names = reference(buddy, ids), PromptReader(byte_tokenizer()).token_text
    assert made["usage"]["completion_tokens"] == 4
    assert {len(values) for values in logprobs.values()} == {len(ids) + 4}
    assert logprobs["tokens"][: len(ids)] == [names(token)[0] for token in ids]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for place, token in enumerate(ids[1:]):
        own, row = logprobs["token_logprobs"][1 + place], expected[place]
        assert own == pytest.approx(row[token].item(), abs=1e-4)
        found = logprobs["top_logprobs"][1 + place]
        wanted = {names(at)[0]: row[at].item() for at in row.topk(3).indices.tolist()}
        assert found == pytest.approx(wanted | {names(token)[0]: own}, abs=1e-4)
    reached = 0
    for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert offset == len(choice["text"].encode()[:reached].decode(errors="ignore"))
        reached += len(name.encode()) if not name.startswith("bytes:") else 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_no_tokens_are_made_where_a_prompt_alone_is_scored(running, stream, logprobs):
    body = {"prompt": list(TEXTS), "max_tokens": 0, "echo": True, "logprobs": logprobs}
    reply = ask(running, **body, stream=stream, **_usage(stream))
    made = events(reply) if stream else [reply.json()]
    told = [choice for each in made for choice in each["choices"] if choice["text"]]
    assert sorted(choice["text"] for choice in told) == sorted(TEXTS)
    for choice in told:
        found = choice["logprobs"]
        assert (found is None) == (logprobs is None)
        assert found is None or len(found["tokens"]) == len(ids_of(choice["text"]))
    ends = [choice["finish_reason"] for each in made for choice in each["choices"]]
    assert [end for end in ends if end] == ["length"] * 2
    usage = made[-1]["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == sum(len(ids_of(text)) for text in TEXTS)
    assert usage["buddy"]["budget_blocks"] == 4
    fed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["buddy"]["blocks_executed"] == 4 * fed
    assert logprobs is None or fed == usage["prompt_tokens"]


def _usage(stream):
    return {"stream_options": {"include_usage": True}} if stream else {}


def test_prompt_logprobs_are_by_token_id_with_ranks_for_both_kinds(running, buddy):
    names = PromptReader(byte_tokenizer()).token_text
    ids = ids_of(TEXTS[0])
    completion = ask(running, prompt=TEXTS[0], prompt_logprobs=2, max_tokens=0).json()
    messages = [{"role": "user", "content": TEXTS[0]}]
    chat = ask(running, "chat/completions", messages=messages, prompt_logprobs=2, n=2).json()
    listed = completion["choices"][0]["prompt_logprobs"]
    assert listed == chat["prompt_logprobs"]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert completion["choices"][0]["text"] == ""
    assert listed[0] is None
    for entry, token, row in zip(listed[1:], ids[1:], reference(buddy, ids), strict=True):
        wanted = {token: int((row > row[token]).sum()) + 1}
        wanted |= {at: rank for rank, at in enumerate(row.topk(2).indices.tolist(), 1)}
        assert [int(at) for at in entry] == [*wanted]
        for at, rank in wanted.items():
            told = entry[str(at)]
            assert (told["rank"], told["decoded_token"]) == (rank, names(at)[0])
            assert told["logprob"] == pytest.approx(row[at].item(), abs=1e-4)


def test_there_is_a_logprob_for_each_token_of_the_usage_and_the_end_has_one(running):
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "logit_bias": {str(END): 100}}
    made = ask(running, **body).json()
    (choice,) = made["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert made["usage"]["completion_tokens"] == 1
    assert choice["logprobs"]["tokens"] == ["a", "b", "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    *_, end, _ = events(ask(running, **body, stream=True))
    assert end["choices"][0]["logprobs"]["tokens"] == ["</s>"]


def test_the_drawn_token_is_among_the_alternatives_of_a_chat(running):
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "temperature": 2}
    drawn = 0
    for top in (0, 1, 3):
        body |= {"top_logprobs": top, "seed": 3, "max_tokens": 20}
        (choice,) = ask(running, "chat/completions", **body).json()["choices"]
        for token in choice["logprobs"]["content"]:
            others = token["top_logprobs"]
            own = {name: token[name] for name in ("token", "logprob", "bytes")}
            assert top <= len(others) <= top + (top > 0)
            assert (own in others) == (top > 0)
            drawn += len(others) > top
    assert drawn > 20, "most drawn tokens are none of the best"


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
def test_places_are_those_of_the_text_that_was_sent(make):
    """Whatever a tokenizer puts before a text, and whatever its decoder takes off."""
    tokenizer = make()
    reader = PromptReader(tokenizer)
    text = "Hello world é"
    (ids,) = reader.prompts(text)
    begun = (END, *ids)
    for tokens in (ids, begun):
        (echo,) = echoes(CompletionBody(prompt=text, echo=True), [tokens], reader)
        assert echo.text == text
        plain = echo.offsets[-len(ids) :]
        assert plain[0] == 0
        assert list(plain) == sorted(plain)
    (echo,) = echoes(CompletionBody(prompt=list(ids), echo=True), [ids], reader)
    assert (echo.text, echo.offsets) == (text, plain)
    if make is fallback_tokenizer:
        words = tuple(tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"]))
        (echo,) = echoes(CompletionBody(prompt="Hello world", echo=True), [words], reader)
        assert echo.offsets == (0, 5), "the space is the second word's"
    broken = (*tokenizer("日", add_special_tokens=False).input_ids[-1:], *ids[:2])
    (echo,) = echoes(CompletionBody(prompt=list(broken), echo=True), [broken], reader)
    assert max(echo.offsets) <= len(echo.text)


PAIRS = [
    ("The sky is", " blue"),
    ("The sky is", " green or"),
    ("", "he"),
    ("日本", "é!"),
    ("a", "b"),
]


def test_lm_eval_finds_over_http_what_it_finds_in_process(running, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    over_http = LocalCompletionsAPI(
        base_url=f"{running.url}/v1/completions",
        model="tiny",
        tokenizer=str(tmp_path),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        max_length=128,
        batch_size=2,
    )
    in_process = BuddyLM(byte_buddy(), tokenizer=byte_tokenizer())  # it sets the policy
    asked = [
        Instance(
            request_type="loglikelihood",
            doc={},
            arguments=pair,
            idx=0,
            metadata=("t", place, 1),
        )
        for place, pair in enumerate(PAIRS)
    ]
    theirs, ours = over_http.loglikelihood(asked), in_process.loglikelihood(asked)
    for (one, is_best), (other, is_other) in zip(theirs, ours, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
        assert is_best == is_other
    assert len({round(value, 3) for value, _ in theirs}) == len(PAIRS)
