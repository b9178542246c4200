"""Whatever is typed wrongly is one line on stderr and an exit code, before a model is fetched."""

import json
import sys

import pytest

from buddy.cli.main import main
from buddy.hub import fetch, hugging_face, store

GENERATE = ["generate", "Hello."]
TEXT = ["--text", "{text}"]


@pytest.fixture(autouse=True)
def nothing_is_fetched(tmp_path, monkeypatch):
    """An empty home, and fetches that fail the test."""

    def fetched(*arguments, **options):
        raise AssertionError(f"fetched: {arguments}")

    monkeypatch.setenv("BUDDY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch, "_run_pip", fetched)
    monkeypatch.setattr(store, "_convert", fetched)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert hugging_face
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def files(tmp_path):
    """Files that commands may be given, by name."""
    (tmp_path / "text.txt").write_text("words " * 9)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    order = {"kind": "importance", "config": {}, "results": {"removal_order": [5, 6, 7]}}
    (tmp_path / "order.json").write_text(json.dumps(order))
    (tmp_path / "recipe.toml").write_text(
        "[model]\nname = 'smollm2-135m'\n[data]\ntrain = [{path = '"
        + str(tmp_path / "rows.jsonl")
        + "'}]"
    )
    return {
        "text": tmp_path / "text.txt",
        "rows": tmp_path / "rows.jsonl",
        "order": tmp_path / "order.json",
        "recipe": tmp_path / "recipe.toml",
        "out": tmp_path / "out.json",
        "tmp": tmp_path,
    }


def run(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["buddy", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, *capsys.readouterr()


SYNTAX = [
    ([], "nonsense", "no such command 'nonsense'"),
    ([], "generat x", "Did you mean 'generate'?"),
    ([], "--budgit", "no such option: --budgit"),
    ([], "generate", "missing argument 'prompt'; see buddy generate --help"),
    ([], "generate x --budgit 1", "Did you mean --budget?"),
    ([], "generate x --budget", "'--budget' requires an argument"),
    ([], "generate x y", "unexpected extra argument"),
    ([], "eval", "expected one of tasks, ppl, answers, gsm8k, mmlu, rouge"),
    ([], "eval nonsense", "see buddy eval --help"),
    ([], "observe", "expected one of ranks, context"),
    ([], "models nonsense", "no such command 'nonsense'"),
    ([], "bench", "missing option '--out'"),
    ([], "info smollm2-135m --context x", "--context"),
]
BUDGETS = [
    (GENERATE, f"--budget={budget}", says)
    for budget, says in [
        ("abc", "budget 'abc' cannot be read"),
        ("", "budget '' cannot be read"),
        ("nan", "cannot be read"),
        ("-1", "cannot be read"),
        ("1e-1", "cannot be read"),
        ("+0.5", "cannot be read"),
        ("1_8 blocks", "cannot be read"),
        ("\u0660.\u0665", "cannot be read"),
        ("\x1b[31m", "budget '\\x1b[31m' cannot be read"),
        ("9" * 10_000, "cannot be read"),
        ("0", "budget 0 is not allowed"),
        ("1.5", "budget 1.5 is not allowed"),
        ("18", 'for a count write "18 blocks"'),
        ("2 blocks", "expected 3 to 30 blocks"),
        ("31 blocks", "expected 3 to 30 blocks"),
    ]
]
NUMBERS = [
    (GENERATE, flag, says)
    for flag, says in [
        ("--seed=-1", "'--seed': must be at least 0 and at most 9,223,372,036,854,775,807, got -1"),
        (f"--seed={10**30}", f"got {10**30}"),
        ("--seed=x", "'--seed': must be a whole number, got 'x'"),
        (f"--seed={'9' * 5000}", "'--seed'"),
        ("--max-new-tokens=0", "must be at least 1"),
        ("--max-new-tokens=-1", "must be at least 1"),
        (f"--max-new-tokens={10**12}", "at most 2,147,483,647"),
        ("--temperature=1e-40", "must be 0, which takes the likeliest token, or from 0.0001"),
        ("--temperature=nan", "got nan"),
        ("--temperature=inf", "got inf"),
        ("--temperature=-1", "got -1"),
        ("--temperature=1e9", "to 10,000"),
        ("--top-p=0", "must be above 0 and at most 1, got 0"),
        ("--top-p=nan", "got nan"),
        ("--top-p=2", "got 2"),
        ("--top-p=half", "'--top-p': must be a number, got 'half'"),
        ("--top-p=-0.5", "got -0.5"),
    ]
]
CHOICES = [
    (GENERATE, "--prefill-budget=auto", "must be a fraction or a count of blocks"),
    (GENERATE, "--prefill-budget=abc", "budget 'abc' cannot be read"),
    (GENERATE, "--budget=auto --prefill-budget=1.0", "chosen for prompt and answer together"),
    (GENERATE, "--budget=auto --model=smollm2-135m", "trained Budget Predictor"),
    (GENERATE, "--budget=0.5 --policy=full", "choose another policy"),
    (GENERATE, "--policy=nonsense", "no policy 'nonsense'"),
    (GENERATE, "--policy=", "no policy ''"),
    (GENERATE, "--policy=static:1,x", "takes block numbers"),
    (GENERATE, "--policy=static:1,99", "from 0 to 29"),
    (GENERATE, "--policy=static:{tmp}/nowhere.json", "nowhere.json cannot be read"),
    (GENERATE, "--policy=searched:{text}.json", "cannot be read"),
    (GENERATE, "--policy=searched:{order}", "has no sets"),
    (GENERATE, "--policy=random:-1", "below 2**63"),
    (GENERATE, f"--policy=random:{'9' * 5000}", "below 2**63"),
    (GENERATE, "--policy=routed:1", "takes no argument"),
    (GENERATE, "--policy=routed --model=smollm2-135m", "no trained router"),
    (GENERATE, "--reroute=0", "reroute must be"),
    (GENERATE, "--drafts=ngrams", 'drafts must be "none"'),
    (GENERATE, "--drafts=half+ngram", 'drafts must be "none", "ngram", a budget'),
    (GENERATE, "--drafts=ngram+auto", 'drafts must be "none", "ngram", a budget'),
    (GENERATE, "--reroute=never", "reroute must be"),
    (GENERATE, "--reroute=\u0663", "reroute must be"),
    (GENERATE, f"--reroute={'9' * 5000}", "reroute must be"),
    (GENERATE, "--kv-policy=keep", "kv_policy must be one of zero, mask, project, lazy"),
    (GENERATE, "--engine=fast", "engine must be one of auto, native, general"),
    (GENERATE, "--quant=int2", "quant must be one of int8, int4"),
    (GENERATE, "--raw --system=x", "leave one out"),
    (GENERATE, "--system=\udc80", "the system message is no UTF-8 text"),
    (GENERATE, "--trace={tmp}/nowhere/t.json", "there is no folder"),
    (GENERATE, "--trace={tmp}", "no regular file"),
    (GENERATE, "--trace={tmp}/" + "t" * 300, "File name too long"),
    (GENERATE, "--trace={tmp}/" + "t" * 240, "File name too long"),
    (["generate", ""], "", "the prompt is empty"),
    (["generate", " \n"], "", "the prompt is empty"),
    (["generate", "\udcff"], "", "the prompt is no UTF-8 text"),
    (["chat"], "--budget=abc", "budget 'abc' cannot be read"),
    (["chat"], "--temperature=1e-40", "must be 0"),
    (["chat"], "--policy=nonsense", "no policy 'nonsense'"),
]
MODELS = [
    (["info"], "nonsense", "no model named 'nonsense'"),
    (["info"], "", "no model"),
    (["info"], "./nowhere", "no model at ./nowhere"),
    (["info"], "~nobody-here/x", "no model at ~nobody-here/x"),
    (["info"], "x" * 300, "File name too long"),
    (["info"], "{text}", "no model at"),
    (["info"], "{tmp}", "is no model"),
    (["info"], "smollm2-135m --context=0", "must be at least 1"),
]
MEASURING = [
    (command, flag, says)
    for command in (
        ["eval", "ppl", "--out", "{out}", *TEXT],
        ["eval", "answers", "{rows}", "--out", "{out}"],
        ["bench", "--out", "{out}"],
    )
    for flag, says in [
        ("-b abc", "budget 'abc' cannot be read"),
        ("-b 1.0 -b 2_0%", "budget '2_0%' cannot be read"),
        ("-b prefill:1.0", "prompt:1.0,answer:0.5"),
        ("-b prefill:x,decode:0.5", "budget 'x' cannot be read"),
        ("-b prefill:auto,decode:0.5", "must be a fraction or a count of blocks"),
        ("-b 0.5 --policy nonsense", "no policy 'nonsense'"),
        ("-b 0.5 --policy mine=static:{tmp}/none.json", "none.json cannot be read"),
        ("-b 0.5 --policy static:1", "cannot be spent"),
        ("-b 31blocks", "expected 3 to 30 blocks"),
        ("--model nonsense", "no model named 'nonsense'"),
        ("--out {tmp}/nowhere/out.json", "there is no folder"),
        (f"--batch {10**12}", "must be at least 1 and at most"),
    ]
]
OTHERS = [
    (["eval", "ppl", "--out", "{out}"], "--text {tmp}/none.txt", "none.txt cannot be read"),
    (["eval", "ppl", "--out", "{out}", *TEXT], "--stride 2000", "stride must be from 1"),
    (["eval", "ppl", "--out", "{out}", *TEXT], "--window 9000", "context of 8192"),
    (
        ["eval", "ppl", "--out", "{out}", *TEXT],
        "--route-on all",
        "--route-on must be prompt or full",
    ),
    (["eval", "answers", "{tmp}/none.jsonl", "--out", "{out}"], "", "none.jsonl cannot be read"),
    (["eval", "answers", "{rows}", "--out", "{out}"], "--max-tokens 9000", "at most 8192"),
    (["bench", "--out", "{out}"], "--context 8190", "context holds 8192"),
    (["bench", "--out", "{out}"], "--text {tmp}/none.txt", "none.txt cannot be read"),
    (["bench", "--out", "{out}"], "--batch-route x", "batch_route must be"),
    (["bench", "--out", "{out}"], f"--threads {10**9}", "must be at least 1 and at most 1,024"),
    (["importance", "smollm2-135m", "--out", "{out}", *TEXT], "--indicator x", "no indicator 'x'"),
    (["importance", "smollm2-135m", "--out", "{out}", *TEXT], "--protect x", "--protect must be"),
    (["importance", "smollm2-135m", "--out", "{out}", *TEXT], "--tokens 9000", "context of 8192"),
    (
        ["importance", "smollm2-135m", "--out", "{out}", *TEXT],
        "--indicator sleb --rounds 29",
        "SLEB can remove 0 to 28 of 30 blocks",
    ),
    (["importance", "smollm2-135m", "--out", "{out}"], "--text wikitext2", "needs --data-dir"),
    (
        ["search", "smollm2-135m", "--order", "{order}", "--out", "{out}", *TEXT],
        "--depths 26,x",
        "--depths takes block counts",
    ),
    (
        ["search", "smollm2-135m", "--order", "{order}", "--out", "{out}", *TEXT],
        "--depths 12",
        "depths must be different numbers from 27",
    ),
    (
        ["search", "smollm2-135m", "--order", "{tmp}/no.json", "--out", "{out}", *TEXT],
        "--depths 28",
        "no.json cannot be read",
    ),
    (
        ["search", "smollm2-135m", "--order", "{order}", "--out", "{out}"],
        "--depths 28 --answers {tmp}/no.jsonl",
        "no.jsonl cannot be read",
    ),
    (["export", "smollm2-135m-buddy"], "--out {tmp}/x --policy random:1", "cannot be exported"),
    (["export", "smollm2-135m-buddy"], "--out {text}", "holds what is no export of Buddy"),
    (["export", "nonsense"], "--out {tmp}/x", "no model named 'nonsense'"),
    (["observe", "ranks", "smollm2-135m", "--out", "{out}", *TEXT], "--tokens 9000", "of 8192"),
    (
        ["observe", "ranks", "smollm2-135m", "--out", "{out}", *TEXT],
        "--indicator x",
        "no indicator",
    ),
    (
        ["observe", "context", "smollm2-135m", "--out", "{out}", *TEXT],
        f"--from 4 --to {2**31 - 1}",
        "whole steps",
    ),
    (
        ["plot", "accuracy", "{tmp}/none.json", "--out", "{tmp}/a.png"],
        "",
        "none.json cannot be read",
    ),
    (["plot", "accuracy", "{order}", "--out", "{tmp}/a.txt"], "", "a figure is written as"),
    (["plot", "accuracy", "{order}", "--out", "{tmp}/a.png"], "--width nan", "'--width': must be"),
    (["plot", "nonsense", "{order}", "--out", "{tmp}/a.png"], "", "nonsense"),
    (["serve"], "--batch-route x", "'--batch-route': 'x' is not one of 'shared', 'independent'"),
    (["load", "http://127.0.0.1:1", "--out", "{out}"], "--rate 1 --rate x", "a number, got 'x'"),
    (["data", "piqa", "--out", "{tmp}/nowhere/x"], "", "there is no folder"),
    (["train", "{tmp}/none.toml"], "", "none.toml cannot be read"),
    (["train", "{recipe}", "--out", "{text}/run"], "", "cannot be made"),
    (
        ["train", "{recipe}"],
        "--set data.train=[{{path='none.jsonl'}}]",
        "none.jsonl cannot be read",
    ),
    (["train", "{recipe}"], "--set budget.low=abc", "budget 'abc' cannot be read"),
    (["train", "{recipe}"], "--set log.evaluate_budgets=['31blocks']", "3 to 30 blocks"),
    (["train", "{recipe}"], "--set router.policy=nonsense", "no policy 'nonsense'"),
]


@pytest.mark.parametrize(
    ("command", "flags", "says"),
    [*SYNTAX, *BUDGETS, *NUMBERS, *CHOICES, *MODELS, *MEASURING, *OTHERS],
)
def test_it_is_one_line_and_nothing_is_fetched(monkeypatch, capsys, files, command, flags, says):
    monkeypatch.chdir(files["tmp"])
    typed = [flags] if command in (["info"], GENERATE) and "--" not in flags[2:] else flags.split()
    arguments = [argument.format(**files) for argument in [*command, *typed]]
    if command[:1] == ["generate"] and command != GENERATE:
        arguments = command
    before = sorted(files["tmp"].iterdir())
    code, out, err = run(monkeypatch, capsys, arguments)
    assert says in err
    assert err.startswith("buddy: ")
    assert err.count("\n") == 1
    assert err.strip().isprintable()
    assert code in (1, 2)
    assert out == ""
    assert sorted(files["tmp"].iterdir()) == before


@pytest.mark.parametrize("arguments", [["--json"], ["--show-depth"]])
def test_a_model_that_would_be_fetched_is_asked_for_only_once_all_is_right(
    monkeypatch, capsys, arguments
):
    with pytest.raises(AssertionError, match="fetched"):
        run(monkeypatch, capsys, [*GENERATE, "--budget", "0.6", *arguments])


def test_what_needs_no_weights_fetches_none(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, ["info", "smollm2-135m", "--json"])
    assert (code, err) == (0, "")
    assert json.loads(out)["blocks"] == 30
    assert run(monkeypatch, capsys, [])[0] == 0
