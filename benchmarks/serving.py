"""What does a server on this machine keep of what it promises? One check at a time, each a record.

    python benchmarks/serving.py speed --out results/serving/speed.json

    speed      tokens/s of one client and of eight, over HTTP, against `generate` at batch 1 and 8
    cost       error of the predicted time of a step, on steps that it was not fitted on
    deadlines  answers that keep their time for a token, one at a time and three at once
    overload   three times what full depth can serve: who is refused, what the others get
    memory     resident memory over 10,000 short requests
    hostile    20 honest clients beside bodies that freeze and 1,200 connections that say nothing
    ready      seconds of a warm start until `/ready`, and of importing torch and transformers alone
    parity     greedy answers to OpenAI's client, eight at once, against `generate`

Rounds of `speed` take turns, and a ratio is taken within a round. Where a server is loaded,
requests come at random times, whatever it does.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from openai import OpenAI
from rich.progress import track
from served import served
from startup import COMMANDS

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.hub.presets import ROUTED_MODEL
from buddy.lab import experiment
from buddy.lab.load.load import PROMPTS, LoadConfig, run_load
from buddy.serving.control.cost import Correction
from buddy.serving.rows.calibrate import Bench, cost_of, samples

CHAT = "/v1/chat/completions"


def load_model(args):
    """The model as the server loads it."""
    return BuddyForCausalLM.from_pretrained(args.model, merge_adapter=True)


def tokenized(tokenizer, messages):
    """What `generate` takes for some conversations, side by side."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )


def body_of(text, **more):
    """A request with one message of a user."""
    return {"messages": [{"role": "user", "content": text}], **more}


def client_of():
    """A client that waits for slow answers."""
    return httpx.AsyncClient(timeout=300, trust_env=False)


def speed(args):
    """Tokens a second, by clients."""
    model, tokenizer = load_model(args), load_tokenizer(args.model)
    seen = {clients: [] for clients in (1, 8)}
    draw = random.Random(0)

    def prompts(clients):
        texts = [f"{draw.randrange(10**6)}. {draw.choice(PROMPTS)}" for _ in range(clients)]
        return [body_of(text)["messages"] for text in texts]

    def by_generate(messages):
        inputs = tokenized(tokenizer, messages)
        model.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=None)

    async def by_server(client, url, messages):
        async def ask(message):
            body = {"messages": message, "max_tokens": args.new_tokens, "ignore_eos": True}
            answer = await client.post(
                f"{url}{CHAT}", json={**body, "temperature": 0, "budget": 1.0}
            )
            assert answer.json()["usage"]["completion_tokens"] == args.new_tokens

        await asyncio.gather(*map(ask, messages))

    async def measure(url):
        async with client_of() as client:
            for number in track(range(args.rounds + 1), transient=True):
                for clients, found in seen.items():
                    time.sleep(1)  # threads of the other process wait for work by spinning
                    begun = time.perf_counter()
                    by_generate(prompts(clients))
                    theirs = time.perf_counter() - begun
                    time.sleep(1)
                    begun = time.perf_counter()
                    await by_server(client, url, prompts(clients))
                    ours = time.perf_counter() - begun
                    if number:
                        found.append((theirs, ours))

    with served(args.model) as (url, _):
        asyncio.run(measure(url))
    results = {}
    for clients, found in seen.items():
        ratios = [theirs / ours for theirs, ours in found]
        made = clients * args.new_tokens
        results[str(clients)] = {
            "generate_tokens_per_s": made / statistics.median(a for a, _ in found),
            "server_tokens_per_s": made / statistics.median(b for _, b in found),
            "server_over_generate": statistics.median(ratios),
            "by_round": ratios,
        }
    return results


def cost(args):
    """Relative errors of predictions."""
    model = load_model(args)
    model.executor.refresh()
    predicts = cost_of(model, args.rows)
    bench, correction = Bench(model, args.rows, "shared"), Correction()
    token_bytes = 2.0 * model.backbone.kv_width * model.dtype.itemsize * model.num_blocks
    rounds = samples(model.num_blocks, args.rows, bench.longest, token_bytes, seed=1)
    steps = [step for _, plan in zip(range(args.rounds), rounds, strict=False) for step in plan]
    bench.run(steps[0], time.perf_counter)
    errors = []
    for sample in track(steps, transient=True):
        taken = bench.run(sample, time.perf_counter)
        alone = predicts.predict(sample.shape)
        errors.append(abs(alone * correction.factor / taken - 1))
        correction.update(taken, alone)
    errors.sort()
    return {
        "steps": len(errors),
        "median": statistics.median(errors),
        "p95": errors[int(0.95 * len(errors))],
    }


def deadlines(args):
    """Share of answers within their time for a token."""
    with served(args.model) as (url, _):
        least = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["buddy"]
        results = {"least_ms_per_token": least["least_ms_per_token"]}
        for times in (1.3, 1.6, 2.0, 3.0):
            ms = round(times * least["least_ms_per_token"], 2)

            async def ask(client, prompt, ms=ms):
                body = body_of(
                    prompt,
                    stream=True,
                    stream_options={"include_usage": True},
                    temperature=0,
                    max_tokens=args.new_tokens,
                    ignore_eos=True,
                    budget={"ms_per_token": ms},
                )
                stamps, usage = [], {}
                async with client.stream("POST", f"{url}{CHAT}", json=body) as said:
                    async for line in said.aiter_lines():
                        stamps.append(time.perf_counter()) if '"content"' in line else None
                        if '"completion_tokens"' in line:
                            usage = httpx.Response(200, text=line[5:]).json()["usage"]
                spent = 1e3 * (stamps[-1] - stamps[0]) / (usage["completion_tokens"] - 1)
                return spent, usage["buddy"]["blocks_per_token"]

            async def run(together, ask=ask):
                draw = random.Random(0)
                async with client_of() as client:
                    found = []
                    for _ in range(args.rounds):
                        asked = [ask(client, draw.choice(PROMPTS)) for _ in range(together)]
                        found += await asyncio.gather(*asked)
                    return found

            for together in (1, 3):
                found = asyncio.run(run(together))
                results[f"{times} times the least, {together} at once"] = {
                    "ms_per_token": ms,
                    "answers": len(found),
                    "kept": statistics.mean(spent <= ms for spent, _ in found),
                    "blocks_per_token": statistics.mean(blocks for _, blocks in found),
                    "spent_ms": [spent for spent, _ in found],
                }
    return results


def overload(args):
    """Far more than can be served, and then an answer at full depth again."""
    promised = ("--slo-ttft-ms", 2000, "--slo-itl-ms", args.itl_ms, "--min-budget", 0.5)
    with served(args.model, *promised) as (url, _):
        results = {}
        for name, rate in (("busy", args.rate), ("overload", 3 * args.rate)):
            config = LoadConfig(
                url=url,
                rates=(rate,),
                duration_s=args.duration,
                max_tokens=64,
                slo_ttft_ms=2000,
                slo_itl_ms=args.itl_ms,
                seed=1,
            )
            found = run_load(config)
            results[name] = found["points"][0]
            others = [request for request in found["requests"] if not request["finished"]]
            results[name]["statuses_of_others"] = sorted({request["status"] for request in others})
        ended = time.perf_counter()
        while True:
            body = body_of(PROMPTS[0], max_tokens=8)
            answer = httpx.post(f"{url}{CHAT}", json=body, timeout=60, trust_env=False)
            usage = answer.json()["usage"]["buddy"]
            if usage["blocks_per_token"] == usage["num_blocks"]:
                break
        results["full_depth_again_s"] = time.perf_counter() - ended
    return results


def memory(args):
    """Resident bytes of the server's process, by requests served."""
    with served(args.model) as (url, process):

        def resident():
            fields = Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1]
            return int(fields.split()[0]) * 1024

        async def run(requests, seed):
            draw = random.Random(seed)
            async with client_of() as client:

                async def ask(number):
                    text = f"{number}: {draw.choice(PROMPTS)}"
                    tokens, budget = draw.choice((1, 2, 4)), draw.choice((1.0, 0.75, 0.5))
                    body = body_of(text, max_tokens=tokens, budget=budget)
                    return (await client.post(f"{url}{CHAT}", json=body)).status_code

                lost = 0
                for first in range(0, requests, 16):
                    count = min(16, requests - first)
                    statuses = await asyncio.gather(*(ask(first + at) for at in range(count)))
                    lost += sum(status != 200 for status in statuses)
                return lost

        asyncio.run(run(args.requests // 10, 0))
        warm, lost, curve = resident(), 0, []
        for part in track(range(10), transient=True):
            lost += asyncio.run(run(args.requests // 10, part + 1))
            curve.append(resident())
    return {"warm_bytes": warm, "bytes": curve, "grown": curve[-1] / warm - 1, "lost": lost}


def hostile(args):
    """What honest clients and `/health` get, and resident memory, by the load of the tests."""
    with served(args.model) as (url, process):
        load = ("-m", "tests.hostile.load", url, str(process.pid), str(args.duration))
        root = Path(__file__).parents[1]
        made = subprocess.run([sys.executable, *load], cwd=root, check=True, stdout=subprocess.PIPE)
    return json.loads(made.stdout)


def ready(args):
    """Seconds of a start until requests are taken, and of the imports alone, taking turns."""
    found = []
    for number in track(range(args.rounds + 1), transient=True):
        begun = time.perf_counter()
        with served(args.model) as (url, _):
            while httpx.get(f"{url}/ready", trust_env=False).status_code != 200:
                time.sleep(0.05)
            start_s = time.perf_counter() - begun
        begun = time.perf_counter()
        subprocess.run(COMMANDS["import"], check=True, capture_output=True)
        if number:  # the first round fills caches of files, and of the cost of a step
            found.append((start_s, time.perf_counter() - begun))
    return {
        "ready_s": statistics.median(start for start, _ in found),
        "import_s": statistics.median(alone for _, alone in found),
        "by_round": found,
    }


def parity(args):
    """Answers that are those of `generate`, and the prompts of those that are not."""
    model, tokenizer = load_model(args), load_tokenizer(args.model)
    draw = random.Random(0)
    budgets = (1.0, 0.85, 0.75, 0.5)
    asked = [
        (f"{number}. {draw.choice(PROMPTS)}", draw.choice(budgets))
        for number in range(args.requests)
    ]

    def by_generate(text, budget):
        inputs = tokenized(tokenizer, [body_of(text)["messages"]])
        made = model.generate(
            **inputs, max_new_tokens=args.new_tokens, do_sample=False, budget=budget
        )
        return tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    with served(args.model) as (url, _), ThreadPoolExecutor(8) as pool:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        name = client.models.list().data[0].id

        def by_client(request):
            answer = client.chat.completions.create(
                model=name,
                **body_of(request[0]),
                max_tokens=args.new_tokens,
                temperature=0,
                extra_body={"budget": request[1]},
            )
            return answer.choices[0].message.content

        found = list(pool.map(by_client, asked))
    others = [
        {"prompt": request[0], "budget": request[1], "server": answer, "generate": expected}
        for request, answer in zip(asked, found, strict=True)
        if answer != (expected := by_generate(*request))
    ]
    return {"requests": len(asked), "same": len(asked) - len(others), "others": others}


CHECKS = {
    "speed": speed,
    "cost": cost,
    "deadlines": deadlines,
    "overload": overload,
    "memory": memory,
    "hostile": hostile,
    "ready": ready,
    "parity": parity,
}


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("check", choices=sorted(CHECKS))
    parser.add_argument("--model", default=ROUTED_MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32, help="of cost")
    parser.add_argument("--requests", type=int, default=10_000, help="of memory and parity")
    parser.add_argument("--rate", type=float, default=4.0, help="that full depth can serve")
    parser.add_argument("--itl-ms", type=float, default=60.0, help="promise, of overload")
    parser.add_argument(
        "--duration", type=float, default=20.0, help="of each load in overload, and of hostile"
    )
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    results = CHECKS[args.check](args)
    for name, value in results.items():
        if isinstance(value, dict):
            value = {key: figure for key, figure in value.items() if not isinstance(figure, list)}
        print(f"{name}: {value}")
    experiment.save(args.out, f"serving-{args.check}", results, config=args)


if __name__ == "__main__":
    experiment.run(main)
