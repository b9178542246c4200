r"""How fast are others on the same weights and the same machine? Prefill and decode, taking turns.

Each engine has a process of its own, which is stopped while another one works, so that none spins
on the cores of another. A round asks each engine for each case, in a new order; a ratio is taken
within a round, and its median is reported. A prefill ends where the first token's logits are known;
a decode step is what one more token costs from there on.

    python benchmarks/beside_others.py --vllm VENV/bin/python --out results/beside-others.json

vLLM has its own environment, and its CPU build; llama.cpp has one too, with llama-cpp-python
compiled on this machine, and reads the same weights from a GGUF file in bfloat16 (--llama, --gguf).
What is not named is left out. With `--quant int8` and a GGUF of Q8_0, or `--quant int4` and one of
Q4_0, both have weights in fewer bits:

    BUDDY_NATIVE=avx2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/beside_others.py --threads 1 \
        --llama PYTHON --gguf Q4_0.gguf --quant int4 --llama-alone --out results/beside-int4.json
"""

import argparse
import itertools
import random
import sys
import time
from pathlib import Path

from turns import Engine, answer_lines, threads_of

HERE = Path(__file__).resolve().parents[1]
CASES = ("1x256", "8x256", "32x256")
BUDGETS = {"buddy": 1.0, "buddy, half depth": 0.5}
MOST_FED = 8192
"""Tokens that llama.cpp is fed at a time."""


def prompts(vocab, batch, context):
    """Random token ids, the same in every process."""
    draw = random.Random(batch * context)
    return [[draw.randrange(100, vocab - 100) for _ in range(context)] for _ in range(batch)]


def told(tick):
    """What transformers' loop, and Buddy's, asks about each token's logits, so that it tells."""

    def process(ids, scores):
        tick()
        return scores

    return [process]


def buddy(args):
    """Generates with this source tree."""
    import torch

    from buddy import BuddyForCausalLM

    torch.set_num_threads(args.threads)
    model = BuddyForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, quant=args.quant, merge_adapter=True
    )
    model.set_policy("static")

    def run(ids, tokens, tick):
        ids = torch.tensor(ids)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            budget=BUDGETS[args.work],
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            logits_processor=told(tick),
        )

    return run, {"engine": model.executor.describe(), "model": model.facts()}


def transformers(args):
    """Generates with transformers' own loop."""
    import torch
    from transformers import AutoModelForCausalLM, __version__

    from buddy.checkpoint.resolve import resolve

    torch.set_num_threads(args.threads)
    folder = resolve(args.model).base.folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(ids, tokens, tick):
        ids = torch.tensor(ids)
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                logits_processor=told(tick),
                **options,
            )

    return run, {"engine": f"transformers {__version__}"}


def vllm(args):
    """Generates with vLLM, in its own environment."""
    from vllm import LLM, SamplingParams, __version__

    model = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def run(ids, tokens, tick):
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        how = SamplingParams(max_tokens=tokens, min_tokens=tokens, **options)
        engine, begun = model.llm_engine, set()
        for number, row in enumerate(ids):
            engine.add_request(str(number), {"prompt_token_ids": row}, how)
        while engine.has_unfinished_requests():
            begun |= {out.request_id for out in engine.step()}
            if len(begun) == len(ids):
                tick()

    return run, {"engine": f"vLLM {__version__}"}


def llama(args):
    """Generates with llama.cpp, in its own environment: one sequence of its batch a row."""
    import ctypes

    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(args.gguf.encode(), lib.llama_model_default_params())
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    options = lib.llama_context_default_params()
    cases = cases_of(args)
    rows = max(batch for batch, _ in cases)
    slots = max(context for _, context in cases) + args.new_tokens + 1
    options.n_ctx, options.n_seq_max, options.kv_unified = (
        rows * (-(-slots // 256) * 256),
        rows,
        False,
    )
    options.n_batch = MOST_FED  # computed in parts of 512, as it is by default: faster than whole
    options.n_threads = options.n_threads_batch = args.threads
    context = lib.llama_init_from_model(model, options)
    batch = lib.llama_batch_init(MOST_FED, 0, 1)

    def feed(tokens, wanted):
        """Feed (token, position, row) and give the best next token after each that is wanted."""
        batch.n_tokens = len(tokens)
        for place, (token, position, row) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = place in wanted
        if lib.llama_decode(context, batch) != 0:
            sys.exit("llama.cpp cannot hold the batch")
        return [
            int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, place), (size,)).argmax())
            for place in sorted(wanted)
        ]

    def run(ids, tokens, tick):
        lib.llama_memory_clear(lib.llama_get_memory(context), ctypes.c_bool(False))
        length = len(ids[0])
        fed = [(token, at, row) for row, own in enumerate(ids) for at, token in enumerate(own)]
        ends = [length * (row + 1) - 1 for row in range(len(ids))]
        new = []
        for first in range(0, len(fed), MOST_FED):
            part = fed[first : first + MOST_FED]
            new += feed(part, {end - first for end in ends if 0 <= end - first < len(part)})
        tick()
        for step in range(tokens - 1):
            fed = [(token, length + step, row) for row, token in enumerate(new)]
            new = feed(fed, set(range(len(ids))))

    return run, {"engine": f"llama.cpp of llama-cpp-python {lib.__version__}"}


ENGINES = {
    **dict.fromkeys(BUDGETS, buddy),
    "transformers": transformers,
    "vllm": vllm,
    "llama.cpp": llama,
}
"""What makes a worker's run, by name; those with an environment of their own may be left out."""


def timing(args):
    """What runs a case and says its seconds, and what the engine is."""
    run, facts = ENGINES[args.work](args)
    clock = time.process_time if args.processor_time else time.perf_counter

    def timed(case):
        batch, context, tokens = case
        ids, ticks = prompts(args.vocab, batch, context), []
        begun = clock()
        run(ids, 1 + tokens, lambda: ticks.append(clock()))
        ended, first = clock(), ticks[0]
        return {"prefill_s": first - begun, "decode_s": (ended - first) / tokens}

    return timed, facts


def started(name, args, model):
    """The process of an engine."""
    own = environments(args)
    python = own.get(name) or sys.executable
    sources = {"PYTHONPATH": "" if name in own else str(HERE / "src")}
    command = [python, __file__, *forwarded(args), "--work", name, "--model", model]
    return Engine(command, {**sources, **threads_of(args.threads)})


def cases_of(args):
    """Rows and tokens of each prompt."""
    return [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]


def environments(args):
    """The Python of each engine that has its own, or None."""
    return {"vllm": args.vllm, "llama.cpp": args.llama}


def forwarded(args):
    """What a worker needs of the command line."""
    wanted = ["--threads", str(args.threads), "--vocab", str(args.vocab), "--out", str(args.out)]
    wanted += ["--cases", args.cases, "--new-tokens", str(args.new_tokens)]
    wanted += ["--gguf", args.gguf] if args.gguf else []
    wanted += ["--processor-time"] if args.processor_time else []
    return wanted + (["--quant", args.quant] if args.quant else [])


def read_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM")
    parser.add_argument("--llama", help="the Python of an environment that has llama-cpp-python")
    parser.add_argument("--gguf", help="the model's weights for llama.cpp, in bfloat16 or as quant")
    parser.add_argument("--quant", help="int8 or int4: Buddy's weights; others' are theirs")
    parser.add_argument("--llama-alone", action="store_true", help="leave transformers out")
    parser.add_argument("--cases", default=",".join(CASES), help="batch x context, as in 1x256")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the processor's seconds, which other processes hardly lengthen; of one thread",
    )
    parser.add_argument("--vocab", type=int, default=40_000, help="random ids lie below")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    """Measure, show, record."""
    args = read_arguments()
    if args.work:
        answer_lines(lambda: timing(args))
        return
    from buddy.checkpoint.resolve import resolve
    from buddy.lab import experiment

    folder = str(resolve(args.model).base.folder())
    own = environments(args)
    if (args.llama is None) != (args.gguf is None):
        sys.exit("llama.cpp needs both: expected --llama PYTHON and --gguf FILE")
    if args.processor_time and args.threads != 1:
        sys.exit(f"--processor-time is of one thread: expected --threads 1, got {args.threads}")
    names = [name for name in ENGINES if own.get(name, "ours")]
    if args.llama_alone:
        names.remove("transformers")
    engines = {name: started(name, args, folder) for name in names}
    cases = cases_of(args)
    seen = experiment.take_turns(
        names, cases, args.rounds, lambda name, case: engines[name].ask((*case, args.new_tokens))
    )
    facts = {name: engine.facts for name, engine in engines.items()}
    for engine in engines.values():
        engine.end()
    cells = []
    for (batch, context), name in itertools.product(cases, names):
        rounds = seen[batch, context]
        for phase, tokens in (("prefill_s", batch * context), ("decode_s", batch)):
            rates = [tokens / made[name][phase] for made in rounds]
            ratios = [made[name][phase] / made["buddy"][phase] for made in rounds]
            cells.append(
                {
                    "engine": name,
                    "batch": batch,
                    "context": context,
                    "phase": phase.removesuffix("_s"),
                    "tokens_per_s": experiment.median(rates),
                    "buddy_over_it": experiment.median(ratios),
                    "ratios": ratios,
                }
            )
            print(
                f"{batch}x{context} {phase:<9} {name:<17} {experiment.median(rates):7.0f} tokens/s"
                f"   buddy at full depth is {experiment.median(ratios):.2f} times as fast"
            )
    model = facts["buddy"].pop("model")
    facts["buddy, half depth"].pop("model")
    config = {**experiment.texts(args), "model": Path(folder).name, "engines": facts}
    for name in ("vllm", "llama", "gguf", "work"):
        del config[name]
    experiment.save(args.out, "beside-others", {"cells": cells}, config=config, model=model)


if __name__ == "__main__":
    main()
