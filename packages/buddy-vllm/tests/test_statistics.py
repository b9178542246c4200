"""What ran is added up by request, by HTTP answer, and for the log."""

import pytest

pytest.importorskip("prometheus_client", reason="what vLLM brings is not installed here")

from buddy_vllm.statistics import Account, Totals, report


def test_an_answer_of_several_prompts_names_each_ones_blocks():
    first, second = Account(15, 30, tokens=10), Account(18, 30, tokens=3)
    assert report([first]) == {"blocks": 15, "num_blocks": 30, "blocks_executed": 150}
    assert report([first, second]) == {
        "blocks": [15, 18],
        "num_blocks": 30,
        "blocks_executed": 150 + 54,
    }


def test_what_has_not_ended_has_no_sum():
    ended, running = Account(15, 30, tokens=10), Account(15, 30, open=1, tokens=4)
    assert report([ended, running]) == {"blocks": 15, "num_blocks": 30}


def test_the_log_has_one_line_about_what_ended_since_the_last():
    totals = Totals()
    assert totals.line() is None
    totals.add(Account(15, 30), 10)
    totals.add(Account(30, 30), 30)
    said = "Buddy: 2 answers ended, 26.25 of 30 blocks per token over 40 tokens"
    assert totals.line() == said
    assert totals.line() is None


def test_usage_blocks_of_a_stream_are_extended_and_nothing_else():
    pytest.importorskip("fastapi", reason="what vLLM brings is not installed here")
    from buddy_vllm.endpoint import _extended

    accounts = [Account(15, 30, tokens=2)]
    for chunk in ("data: [DONE]\n\n", 'data: {"choices":[{"text":"\\"usage\\":{"}]}\n\n', b"x"):
        assert _extended(chunk, accounts) == chunk
    said = _extended('data: {"usage":{"prompt_tokens":2},"x":"\u00e9"}\n\n', accounts)
    assert said == (
        'data: {"usage": {"prompt_tokens": 2, "buddy": {"blocks": 15, "num_blocks": 30, '
        '"blocks_executed": 30}}, "x": "\u00e9"}\n\n'
    )
