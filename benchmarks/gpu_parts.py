r"""The parts of a GPU day that no other script does; `benchmarks/gpu_day.py` runs them.

python benchmarks/gpu_parts.py engines --device cuda --size smollm2-135m --out engines.json
"""

import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch
from shapes import SHAPES, random_model

from buddy import BuddyForCausalLM, DepthTrace
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.step import Step
from buddy.lab import experiment

ROOT = Path(__file__).parents[1]


def versions(device, size, folder):
    """What this machine has."""
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        driver = "/proc/driver/nvidia/version"
        found |= {
            "cuda": torch.version.cuda,
            "card": card.name,
            "capability": f"{card.major}.{card.minor}",
            "memory_bytes": total,
            "free_bytes": free,
            "driver": Path(driver).read_text().splitlines()[0] if Path(driver).exists() else "",
        }
    return found


def snippet(device, size, folder):
    """README's first Python block, on the device that is taken where none is named."""
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    begun = time.perf_counter()
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return {"seconds": time.perf_counter() - begun}


def engines(device, size, folder, new_tokens=24):
    """Captured decode steps beside the general path: logits, tokens, and seconds of a step."""
    model = random_model(size, device)
    fast, general = BuddyForCausalLM(model), BuddyForCausalLM(model, engine="general")
    for buddy in (fast, general):
        buddy.set_policy(_static(buddy))
    ids = torch.randint(2, model.config.vocab_size, (2, 24), device=device)
    found = {"engine": fast.executor.name, "budgets": {}}
    for budget in (1.0, 0.5):
        made = {}
        for name, buddy in (("fast", fast), ("general", general)):
            for _ in range(2):  # the first captures
                trace = DepthTrace()
                tokens = experiment.generate(buddy, ids, new_tokens, budget=budget, trace=trace)
            made[name] = tokens[:, 24:], experiment.phase_seconds(trace)
        (fast_tokens, fast_s), (tokens, general_s) = made["fast"], made["general"]
        found["budgets"][budget] = {
            "same_tokens": float((fast_tokens == tokens).float().mean()),
            "logits_apart": _logits_apart(fast, general, ids, budget),
            "fast": fast_s,
            "general": general_s,
        }
    return found


@torch.no_grad()
def _logits_apart(fast, general, ids, budget):
    """Most difference of the logits of a decode step, over the largest of them."""
    steps = []
    for buddy in (fast, general):
        out = buddy(ids, budget=budget)
        steps.append(buddy(ids[:, :1], cache=out.cache, budget=budget).logits.float())
    return float((steps[0] - steps[1]).abs().max() / steps[1].abs().max())


def _static(buddy):
    return "static:" + ",".join(map(str, range(1, buddy.num_blocks - 1)))


def arenas(device, size, folder, joins=300, most_rows=24):
    """Memory of captured steps while sequences join and leave, over that of the live cache."""
    buddy = BuddyForCausalLM(random_model(size, device))
    decoder = buddy.executor.fast_path()
    session, alive, joined = buddy.new_session(1, 4), [], 0
    draw, policy, ratios = random.Random(0), buddy.inference_policy(), []

    def feed(numbers, count):
        ids = torch.full((len(numbers) * count,), 3, device=device)
        step = Step(sequence_ids=numbers, feed=Feed(token_ids=ids, counts=(count,) * len(numbers)))
        run_step(buddy.backbone, policy, session, step, executor=decoder)

    with torch.no_grad():
        while joined < joins:
            gone = alive[1 : 1 + draw.randrange(most_rows)]
            session.leave(*gone)
            alive = [number for number in alive if number not in gone]
            room = min(most_rows, 2 + joined // 4) - len(alive)
            new = [session.join() for _ in range(room)]
            alive, joined = alive + new, joined + len(new)
            if new:
                feed(new, 16)
            feed(alive, 1)
            cache = sum(t.nbytes for t in (*session.kv._keys, *session.kv._values))
            held = sum(
                t.nbytes
                for arena in getattr(decoder, "_arenas", [])
                for t in (*arena.keys, *arena.values)
            )
            ratios.append(held / cache)
    memory = {}
    if torch.cuda.is_available():
        memory = {
            "reserved_bytes": torch.cuda.memory_reserved(),
            "allocated_bytes": torch.cuda.memory_allocated(),
        }
    return {"arenas_over_cache": max(ratios), "at_the_end": ratios[-1], **memory}


def profile(device, size, folder, steps=20):
    """Where the time of a decode step goes: kernels, gaps between them, waits of the host."""
    buddy = BuddyForCausalLM(random_model(size, device))
    buddy.set_policy(_static(buddy))
    ids = torch.randint(2, buddy.config.vocab_size, (1, 24), device=device)
    experiment.generate(buddy, ids, 4, budget=0.5)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    trace = DepthTrace()
    with torch.profiler.profile(activities=kinds) as profiler:
        experiment.generate(buddy, ids, steps + 1, budget=0.5, trace=trace)
    events = profiler.key_averages()
    kernels_us = sum(getattr(event, "self_device_time_total", 0) for event in events)
    waits = {
        event.key: event.count
        for event in events
        if event.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
        or "DtoH" in event.key
    }
    decode_s = experiment.phase_seconds(trace)["decode_s"]
    table = events.table(sort_by="self_cpu_time_total", row_limit=25)
    (folder / "profile.txt").write_text(table)
    return {
        "step_s": decode_s,
        "kernels_s": kernels_us / 1e6 / (steps + 1),
        "waits_a_step": {name: count / (steps + 1) for name, count in waits.items()},
    }


def importance(device, size, folder):
    """Taylor, and the first rounds of SLEB: seconds and memory."""
    from buddy.importance.indicators.indicator import build_indicator
    from buddy.importance.search.sleb import sleb_search

    model = random_model(size, device)
    buddy = BuddyForCausalLM(model)
    tokens = 16 if size == "tiny" else 2048
    ids = torch.randint(2, model.config.vocab_size, (2, tokens), device=device)
    found = {}
    with _measured(found, "taylor"):
        indicator = build_indicator("taylor", buddy.backbone)
        indicator.update(ids)
        scores = indicator.scores()
    assert bool(scores.isfinite().all())
    with _measured(found, "sleb"):
        sleb_search(buddy.backbone, ids, rounds=2)
    return found


@contextlib.contextmanager
def _measured(record, name):
    """Put seconds and the most memory of what runs within into a record."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    yield
    if has_gpu:
        torch.cuda.synchronize()
    record[name] = {"seconds": time.perf_counter() - begun}
    if has_gpu:
        record[name]["peak_bytes"] = torch.cuda.max_memory_allocated()


def save_random(size, device, folder):
    """A model folder of random weights, and a tokenizer of as many words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    random_model(size, device).save_pretrained(folder)
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, SHAPES[size][-1])}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<s>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def serve(device, size, folder):
    """A server under load: answers a second, the first token, and what failed."""
    model = save_random(size, device, folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([*_BUDDY, "serve", "-m", str(model), "--port", str(port)])
    try:
        _wait_for(f"{url}/ready", server)
        small = ("--rate", "2", "--duration", "3", "--max-tokens", "4")
        large = ("--rate", "4", "--rate", "32", "--duration", "20", "--max-tokens", "64")
        load = ("load-test", url, *(small if size == "tiny" else large))
        record = folder / "load.json"
        subprocess.run([*_BUDDY, *load, "--out", str(record)], check=True)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    return {"points": json.loads(record.read_text())["results"]["points"]}


_BUDDY = (sys.executable, "-m", "buddy")


def _wait_for(address, server):
    while server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server ended with exit code {server.returncode}")


def qlora(device, size, folder):
    """The same on a base of 4 bits, where bitsandbytes is there."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"left_out": "no bitsandbytes here"}
    return train(device, size, folder, quant="nf4")


def train(device, size, folder, steps=30, quant=None):
    """The paper's recipe on random weights, killed on its way and resumed: seconds, memory."""
    from buddy.settings import read_recipe
    from buddy.training.router.recipe import Recipe
    from buddy.training.router.run import train as train_router
    from buddy.training.run import RunListener
    from buddy.training.varlen import takes_varlen

    model = save_random(size, device, folder / "model")
    draw, longest = random.Random(0), 20 if size == "tiny" else 400
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(_row(draw, longest)) + "\n" for _ in range(64)))
    changes = [
        f"model.name={str(model)!r}",
        f"data.train=[{{path={str(rows)!r}, template='alpaca'}}]",
        "router.prior='none'",
        f"optim.steps={steps}",
        "log.save_every=5",
        "log.every=1",
        "log.tensorboard=false",
        "log.evaluate_every=0",
        *([] if quant is None else [f"model.quant={quant}"]),
    ]
    recipe, out = ROOT / "recipes" / "paper.toml", folder / "run"
    sets = [word for change in changes for word in ("--set", change)]
    command = [*_BUDDY, "train", str(recipe), "--out", str(out), *sets]
    first = subprocess.Popen(command)
    while first.poll() is None and not (out / "state.safetensors").exists():
        time.sleep(0.2)
    first.kill()
    first.wait()
    found, begun, seconds = {"was_killed": first.returncode != 0}, [], []

    def stepped(step, numbers):
        begun.append(step)
        seconds.append(time.perf_counter())

    with _measured(found, "resumed"):
        listener = RunListener(stepped=stepped)
        train_router(read_recipe(Recipe, recipe, changes), out, resume=True, listener=listener)
    found["went_on_at"] = begun[0] if begun else steps
    _, hidden, _, _, heads, kv_heads, _ = SHAPES[size]
    widths = (heads, kv_heads, hidden // heads)
    found["takes_varlen"] = takes_varlen(torch.device(device), torch.bfloat16, *widths)
    apart = [b - a for a, b in itertools.pairwise(seconds)]
    found["step_s"] = experiment.median(apart) if apart else None
    return found


def _row(draw, longest):
    def words(count):
        return " ".join(f"w{draw.randrange(2, 500)}" for _ in range(count))

    return {"instruction": words(draw.randint(4, longest // 4)), "output": words(longest // 2)}


PARTS = {
    part.__name__: part
    for part in (versions, snippet, engines, arenas, profile, serve, importance, train, qlora)
}


def main():
    """Run one part and write what it found."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    args = parser.parse_args()
    os.environ["BUDDY_DEVICE"] = args.device
    torch.manual_seed(0)
    folder = args.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    found = PARTS[args.part](args.device, args.size, folder)
    experiment.save(args.out, f"gpu-{args.part}", found, config=args)
    print(json.dumps(found))


if __name__ == "__main__":
    experiment.run(main)
