"""Text as it comes: whole characters, and nothing of a stop string."""

import random

import pytest

from buddy.serving.rows.text import StopStrings, TokenText
from tests.product.serving.made import (
    END,
    Bench,
    byte_buddy,
    byte_tokenizer,
    fallback_tokenizer,
    request,
)

TEXT = "héllo, 日本語 🙂 cafe\u0301 \u200d👩‍👩‍👧 end"


def pieces(tokens):
    text = TokenText(byte_tokenizer())
    return [text.push(token) for token in tokens], text


def fallback_ids(tokenizer, text):
    """Its tokens within a text: this tokenizer begins every text with a space."""
    ids = tokenizer(text).input_ids
    return ids[1:] if tokenizer.convert_ids_to_tokens(ids[0]) == "▁" else ids


def ids_of(text):
    return byte_tokenizer()(text).input_ids


def test_no_character_is_ever_broken():
    ids = ids_of(TEXT)
    assert len(ids) > len(TEXT), "characters are of several tokens"
    parts, text = pieces(ids)
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert text.flush() == ""
    assert max(map(len, parts)) <= 2, "nothing is held longer than need be"


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_give_what_the_tokenizer_makes_of_them(seed):
    draw = random.Random(seed)
    ids = [draw.randrange(END + 4) for _ in range(60)]
    ids += ids_of("日本")[: draw.randrange(6)]
    parts, text = pieces(ids)
    whole = byte_tokenizer().decode(ids, skip_special_tokens=True)
    made = "".join(parts) + text.flush()
    assert made.replace("\ufffd", "") == whole.replace("\ufffd", "")
    assert text.flush() == ""
    assert len(text._ids) < 24, "what has been given is forgotten"


def test_a_character_that_the_end_cuts_off_is_given_broken():
    parts, text = pieces(ids_of("a日")[:-1])
    assert parts[0] == "a"
    assert text.flush() == "\ufffd"


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
@pytest.mark.parametrize("seed", range(10))
def test_any_text_comes_whole_whatever_a_cut_character_is_decoded_to(make, seed):
    draw, tokenizer = random.Random(seed), make()
    said = "".join(draw.choice("ab !é世界😀日\u0301") for _ in range(60))
    ids = tokenizer(said).input_ids
    text = TokenText(tokenizer)
    parts = [text.push(token) for token in ids]
    assert "".join(parts) == said == tokenizer.decode(ids)
    assert text.flush() == ""
    assert len(text._ids) < 24, "what has been given is forgotten"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (byte_tokenizer, "a\ufffd"),
        (byte_tokenizer, "\ufffd" * 40),
        (byte_tokenizer, "a" + "\ufffd" * 20 + "b"),
        (fallback_tokenizer, "a\ufffd"),
        (fallback_tokenizer, "a\ufffd\ufffdb\ufffd"),
    ],
)
def test_the_sign_for_broken_characters_is_a_character_too(make, said):
    tokenizer = make()
    text = TokenText(tokenizer)
    parts = [text.push(token) for token in tokenizer(said).input_ids]
    assert "".join(parts) + text.flush() == said


def test_after_bytes_that_are_no_character_text_goes_on():
    tokenizer = fallback_tokenizer()
    broken = tokenizer.convert_tokens_to_ids(["<0xE4>"] * 40)
    text = TokenText(tokenizer)
    made = "".join(map(text.push, [*broken, *tokenizer("a世b").input_ids])) + text.flush()
    assert made == "\ufffd" * 40 + " a世b"


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
@pytest.mark.parametrize("prompt", ["a", "a ", "世", "Hello", "a</s>"])
@pytest.mark.parametrize("answer", [" world!", "a b", "世 é", " "])
def test_what_goes_on_from_a_prompt_keeps_its_first_space(make, prompt, answer):
    tokenizer = make()
    before = tokenizer(prompt).input_ids
    whole = fallback_ids(tokenizer, answer)
    text = TokenText(tokenizer, before)
    made = "".join(map(text.push, whole)) + text.flush()
    assert made == answer
    assert text.length == len(answer)


@pytest.mark.parametrize("prompt", [[0xE4], [0xE4, 0xB8], [0x41, 0xE4]])
def test_a_prompt_that_ends_within_a_character_costs_no_letter(prompt):
    tokenizer = fallback_tokenizer()
    text = TokenText(tokenizer, [3 + byte for byte in prompt])
    made = "".join(map(text.push, [3 + 0x96, *fallback_ids(tokenizer, "ab!")])) + text.flush()
    assert made.endswith("ab!")


def cut(text, stop):
    found = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_across_pieces(seed):
    draw = random.Random(seed)
    text = "".join(draw.choice("ab") for _ in range(24))
    stop = ["".join(draw.choice("ab") for _ in range(draw.randint(1, 5))) for _ in range(2)]
    stops, got, rest = StopStrings(stop), "", text
    while rest:
        size = draw.randint(1, 4)
        new, stopped = stops.push(rest[:size])
        got, rest = got + new, rest[size:]
        assert cut(text, stop).startswith(got), "nothing of a stop string is given"
        if stopped:
            break
    else:
        got += stops.flush()
    assert got == cut(text, stop)


def test_what_cannot_begin_a_stop_string_is_not_held_back():
    stops = StopStrings(["</s>", "##"])
    assert stops.push("a <") == ("a ", False)
    assert stops.push("b#") == ("<b", False)
    assert stops.push("c") == ("#c", False)
    assert stops.push("x##y") == ("x", True)


def test_answers_end_before_their_stop_string():
    buddy = byte_buddy("static:2,3,4,1")
    prompt = ids_of("one")
    (free,) = Bench(buddy).run(request(prompt, 24))
    text = free.text
    stop = text[7:10]
    (told,) = Bench(buddy).run(request(prompt, 24, stop=(stop, "never in it")))
    assert told.text == text[: text.index(stop)]
    assert told.finished.reason == "stop"
    used = told.finished.usage.completion_tokens
    assert used == len(told.tokens) < 24
    (told,) = Bench(buddy).run(request(prompt, 24, stop=(text[-1] + "more",)))
    assert (told.text, told.finished.reason) == (text, "length")


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
def test_special_tokens_between_the_bytes_of_a_character_lose_nothing(make):
    """They are no text; among what is not complete they pushed its first bytes out."""
    text, tokenizer = "Hello 😀 €é", make()
    special = tokenizer.eos_token_id
    for times in (1, 5, 20):
        ids = [
            number
            for token in tokenizer(text, add_special_tokens=False)["input_ids"]
            for number in (*[special] * times, token)
        ]
        stream = TokenText(tokenizer)
        given = "".join(stream.push(token) for token in ids) + stream.flush()
        assert given == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        assert "\ufffd" not in given


def test_a_stop_token_ends_an_answer_and_is_no_part_of_it():
    bench = Bench(byte_buddy("static:2,3,4,1"))
    whole = bench.run(request([1, 2], 12))[0]
    last = whole.tokens[7]
    place = whole.tokens.index(last)
    told = bench.run(request([1, 2], 12, stop_tokens=frozenset({last}), ignore_eos=True))[0]
    assert (told.tokens, told.finished.reason) == (whole.tokens[:place], "stop")
