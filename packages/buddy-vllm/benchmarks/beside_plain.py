"""How fast is the plugin beside plain vLLM, on the same weights? Prefill and decode, taking turns.

Each engine has a process of its own, which is stopped while another one works, so that none spins
on the cores of another. A round asks each case of each engine, in a new order; a ratio is taken
within a round, and its median is reported. A decode step is what one more token costs: the seconds
for all tokens less those for the first, over the tokens between.

    python packages/buddy-vllm/benchmarks/beside_plain.py --vllm VENV/bin/python --out plugin.json

Run by an interpreter that has Buddy, which exports the model; VENV has vLLM and the plugin. Plans
are those of the model's static order, so they are nested. `plain` is vLLM's own class on the
exported weights, without compilation as the plugin is; `--compiled` adds it as vLLM sets itself up.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

HALF = 15
MIXED = (15, 15, 12, 12, 9, 9, 6, 6)
"""Blocks of the rows of a mixed batch; its deepest row runs half of the default model."""


def cases(names):
    """The cases by name: engine, and the blocks of each row, None where nothing is asked for."""
    made = {}
    for batch in (1, 8):
        for name in names:
            if name != "plugin":
                made[f"{name}, batch {batch}"] = name, [None] * batch
        made[f"full depth, batch {batch}"] = "plugin", [None] * batch
        made[f"{HALF} blocks, batch {batch}"] = "plugin", [HALF] * batch
    made["mixed, batch 8"] = "plugin", list(MIXED)
    return made


RATIOS = {
    # Name: a case over another, the phase, what is asked for.
    "full depth, batch 1: prefill": ("plain, batch 1", "full depth, batch 1", "prefill_s", 0.97),
    "full depth, batch 1: decode": ("plain, batch 1", "full depth, batch 1", "decode_s", 0.97),
    "full depth, batch 8: prefill": ("plain, batch 8", "full depth, batch 8", "prefill_s", 0.97),
    "full depth, batch 8: decode": ("plain, batch 8", "full depth, batch 8", "decode_s", 0.97),
    "15 blocks, batch 1: prefill": ("plain, batch 1", "15 blocks, batch 1", "prefill_s", 1.8),
    "15 blocks, batch 1: decode": ("plain, batch 1", "15 blocks, batch 1", "decode_s", 1.4),
    "15 blocks, batch 8: prefill": ("plain, batch 8", "15 blocks, batch 8", "prefill_s", 1.8),
    "15 blocks, batch 8: decode": ("plain, batch 8", "15 blocks, batch 8", "decode_s", 1.4),
    "mixed over its deepest: prefill": (
        *("15 blocks, batch 8", "mixed, batch 8", "prefill_s", 1 / 1.05),
    ),
    "mixed over its deepest: decode": (
        *("15 blocks, batch 8", "mixed, batch 8", "decode_s", 1 / 1.05),
    ),
}


def work(args):
    """Answer each case that comes in with its seconds."""
    from vllm import LLM, SamplingParams, __version__

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    own = {"architectures": ["LlamaForCausalLM"]}
    model = LLM(
        model=args.model,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        enforce_eager=args.work != "compiled",
        disable_log_stats=True,
        **({} if args.work == "plugin" else {"hf_overrides": own}),
    )

    def run(ids, tokens, blocks):
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        how = [
            SamplingParams(
                max_tokens=tokens,
                min_tokens=tokens,
                extra_args=None if count is None else {"budget": f"{count} blocks"},
                **options,
            )
            for count in blocks
        ]
        begun = time.perf_counter()
        model.generate([{"prompt_token_ids": prompt} for prompt in ids], how, use_tqdm=False)
        return time.perf_counter() - begun

    print(json.dumps({"vllm": __version__}), file=answers, flush=True)
    for line in sys.stdin:
        blocks, context, tokens = json.loads(line)
        draw = random.Random(len(blocks) * context)
        ids = [[draw.randrange(100, 40_000) for _ in range(context)] for _ in blocks]
        first = run(ids, 1, blocks)
        found = {"prefill_s": first, "decode_s": (run(ids, 1 + tokens, blocks) - first) / tokens}
        print(json.dumps(found), file=answers, flush=True)


def read_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-buddy")
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM and the plugin")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true", help="vLLM as it sets itself up, too")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args, folder):
    """Seconds of each case in each round after the first, and the engines' facts."""
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
    from turns import Engine, threads_of

    names = ["plain", *(["compiled"] if args.compiled else []), "plugin"]
    settings = {"PYTHONPATH": "", "VLLM_LOGGING_LEVEL": "WARNING", **threads_of(args.threads)}
    command = [args.vllm, __file__, "--model", folder, "--out", str(args.out)]
    engines = {name: Engine([*command, "--work", name], settings) for name in names}
    asked, seen, draw = cases(names), [], random.Random(0)
    for number in range(args.rounds + 1):
        made = {}
        for case in draw.sample(sorted(asked), len(asked)):
            name, blocks = asked[case]
            made[case] = engines[name].ask((blocks, args.context, args.new_tokens))
        if number:  # the first round warms up
            seen.append(made)
    for engine in engines.values():
        engine.end()
    return seen, {name: engine.facts for name, engine in engines.items()}


def main():
    """Export, measure, show, record."""
    args = read_arguments()
    if args.work:
        work(args)
        return
    from buddy import BuddyForCausalLM, load_tokenizer
    from buddy.export.folder import export_model
    from buddy.records import RunRecord

    model = BuddyForCausalLM.from_pretrained(args.model, merge_adapter=True, policy="static")
    facts = model.facts()
    with tempfile.TemporaryDirectory() as folder:
        made = export_model(
            model, Path(folder), tokenizer=load_tokenizer(args.model), source=args.model
        )
        seen, engines = measure(args, folder)
    seconds = {
        case: {
            phase: statistics.median(made[case][phase] for made in seen)
            for phase in ("prefill_s", "decode_s")
        }
        for case in seen[0]
    }
    ratios = {}
    for name, (over, case, phase, wanted) in RATIOS.items():
        rounds = [made[over][phase] / made[case][phase] for made in seen]
        ratios[name] = {"median": statistics.median(rounds), "wanted": wanted, "rounds": rounds}
        print(f"{name:<34} {statistics.median(rounds):5.2f}   wanted at least {wanted:.2f}")
    config = {key: str(value) for key, value in vars(args).items() if key not in ("vllm", "work")}
    RunRecord(
        kind="plugin-beside-plain-vllm",
        model=facts,
        config={**config, "revision": made.revision, "mixed": list(MIXED), "engines": engines},
        results={"seconds": seconds, "ratios": ratios},
    ).save(args.out)


if __name__ == "__main__":
    main()
