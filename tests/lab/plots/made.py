"""Made-up records in the shapes that the measuring commands write."""

import random

from buddy.lab.commonsense import COMMONSENSE

L = 30
DEPTHS = (15, 19, 22, 26, 30)
LABELS = ("routed", "sleb", "shortgpt", "taylor+", "random")


def record(kind, results, **config):
    return {"kind": kind, "command": "buddy ...", "config": config, "results": results}


def point(label, blocks, value, *, task="average", metric="acc", stderr=0.01, **more):
    policy = "full" if label == "full" else more.pop("policy", f"static:{label}.json")
    fields = {"policy": policy, "label": label, "blocks": blocks, "num_blocks": L, "task": task}
    return {**fields, "metric": metric, "value": value, "stderr": stderr, "samples": 500, **more}


def tasks_record(labels=LABELS, depths=DEPTHS, kind="eval-tasks", execution=(), **more):
    points = [point("full", L, 0.52, **more)]
    for place, label in enumerate(labels):
        points += [
            point(label, depth, 0.52 - (0.004 + 0.002 * place) * (L - depth), **more)
            for depth in depths
            if depth < L
        ]
    return record(kind, {"points": points, "execution": list(execution)})


def perplexity_record(labels=LABELS, growth=0.12):
    points = [point("full", L, 14.2, task="wikitext2", metric="perplexity", stderr=0.2)]
    for place, label in enumerate(labels):
        for depth in DEPTHS[:-1]:
            value = 14.2 * 2 ** ((growth + 0.03 * place) * (L - depth))
            points.append(
                point(label, depth, value, task="wikitext2", metric="perplexity", stderr=value / 40)
            )
    return record("eval-ppl", {"points": points, "execution": []})


def execution(label, blocks, rates, task="piqa", num_blocks=L):
    policy = "routed" if label == "routed" else f"static:{label}.json"
    fields = {"policy": policy, "label": label, "blocks": blocks, "num_blocks": num_blocks}
    return {**fields, "task": task, "rates": list(rates)}


def made_rates(label, blocks, seed=0, num_blocks=L):
    """Rates that sum to the depth; of a router, about a third of the blocks vary."""
    rng = random.Random(f"{label} {blocks} {seed}")
    order = list(range(1, num_blocks - 1))
    rng.shuffle(order)
    rates = [1.0] * num_blocks
    for block in order[: num_blocks - blocks]:
        rates[block] = 0.0
    if label == "routed":
        for kept, gone in zip(order[-6:], order[:6], strict=True):
            if rates[gone] == 0.0 and rates[kept] == 1.0:
                share = round(rng.uniform(0.05, 0.95), 2)
                rates[kept], rates[gone] = share, 1 - share
    return rates


def execution_record(labels=LABELS[:3], tasks=("piqa",), depths=DEPTHS[:4]):
    entries = [
        execution(label, depth, made_rates(label, depth, task), task)
        for label in labels
        for task in tasks
        for depth in depths
    ]
    return tasks_record(labels, execution=entries)


def ranks_record(num_blocks=L, inputs=40, pairs=(("delta-ppl", "wikitext2"), ("taylor", "ptb"))):
    series = []
    for indicator, text in pairs:
        rng = random.Random(indicator + text)
        spread = [rng.uniform(0.5, 6.0) for _ in range(num_blocks)]
        ranks = []
        for _ in range(inputs):
            noisy = [(b * 7) % num_blocks + rng.gauss(0, spread[b]) for b in range(num_blocks)]
            order = sorted(range(num_blocks), key=noisy.__getitem__)
            ranks.append([order.index(b) for b in range(num_blocks)])
        series.append({"indicator": indicator, "text": text, "ranks": ranks})
    return record("observe-ranks", {"series": series})


def context_record(num_blocks=L, contexts=tuple(range(256, 513, 32))):
    rng = random.Random(num_blocks)
    start = [(b * 11) % num_blocks + 0.3 for b in range(num_blocks)]
    drift = [rng.gauss(0, 3) if rng.random() < 0.4 else 0.0 for _ in range(num_blocks)]
    ranks = [
        [
            min(num_blocks - 1, max(0, s + d * i / len(contexts) + rng.gauss(0, 0.2)))
            for s, d in zip(start, drift, strict=True)
        ]
        for i in range(len(contexts))
    ]
    stderr = [[0.3] * num_blocks for _ in contexts]
    results = {
        "indicator": "delta-ppl",
        "contexts": list(contexts),
        "ranks": ranks,
        "stderr": stderr,
    }
    return record("observe-context", results)


def cell(policy, phase, blocks, *, label="buddy", batch=1, context=256, num_blocks=L):
    ideal = num_blocks / (blocks + 2) * (num_blocks + 2) / num_blocks
    own = 1 + (ideal - 1) * (0.85 if phase == "prefill" else 0.7) * (1 - 0.1 * (batch > 1))
    own -= 0.04 * (policy == "routed")
    latency = 100.0 / own
    router = 0.05 if policy == "routed" else 0.0
    shares = {"blocks": 0.8 - router, "router": router, "gather_scatter": 0.03, "kv_fill": 0.02}
    return {
        "label": label,
        "policy": policy,
        "phase": phase,
        "blocks": blocks,
        "num_blocks": num_blocks,
        "batch": batch,
        "context": context,
        "tokens_per_s": 1000.0 / latency,
        "latency_ms": latency,
        "latency_ms_min": latency * 0.95,
        "latency_ms_max": latency * 1.08,
        "speedup_own_dense": own,
        "speedup_transformers": own * 1.25,
        "ideal_speedup": ideal,
        "shares": {**shares, "head": 0.1, "host": 0.05},
    }


def speed_record(policies=("static:sleb.json", "routed"), settings=((1, 256),), depths=DEPTHS):
    cells = []
    for batch, context in settings:
        for phase in ("prefill", "decode"):
            theirs = cell(None, phase, L, label="transformers", batch=batch, context=context)
            more = {"speedup_own_dense": 0.8, "speedup_transformers": 1.0, "shares": None}
            cells += [theirs | more, cell("full", phase, L, batch=batch, context=context)]
            cells += [
                cell(policy, phase, depth, batch=batch, context=context)
                for policy in policies
                for depth in depths
                if depth < L
            ]
    return record("eval-speed", {"cells": cells})


def importance_record(indicator="taylor", num_blocks=L, protect="ends", **config):
    rng = random.Random(indicator)
    scores = [rng.lognormvariate(0, 1.0) for _ in range(num_blocks)]
    scores[0] = 40.0
    inner = {"ends": range(1, num_blocks - 1), "none": range(num_blocks)}[protect]
    order = sorted(inner, key=scores.__getitem__)
    results = {"importance": scores, "removal_order": order}
    return record(f"importance-{indicator}", results, protect=protect, **config)


def sleb_record(num_blocks=L):
    order = list(range(1, num_blocks - 1))
    random.Random(3).shuffle(order)
    nll = [2.6 + 0.1 * i for i in range(num_blocks - 1)]
    return record("importance-sleb", {"removal_order": order, "nll": nll}, protect="ends")


def predictor_record(steps=range(500, 10_001, 500), lambda_cost=0.05):
    curve = {
        "step": list(steps),
        "loss": [0.02 * (-1) ** i - 0.03 for i, _ in enumerate(steps)],
        "reward": [-9.0 + 1.2 * (1 - 0.8**i) for i, _ in enumerate(steps)],
        "cross_entropy": [1.8 - 0.24 * (1 - 0.8**i) for i, _ in enumerate(steps)],
        "entropy": [3.33 * 0.9**i for i, _ in enumerate(steps)],
    }
    results = {"curve": curve, "evaluation": {"constant_reward": -7.5}}
    grpo = {"samples": 4, "lambda_perf": 5.0, "lambda_cost": lambda_cost}
    return record("training-budget", results, grpo=grpo, optim={"steps": 10_000})


def auto_record():
    points = []
    for place, task in enumerate(("piqa", "boolq", "arc_challenge", "average")):
        of = {"task": task, "metric": COMMONSENSE.get(task, "acc")}
        points.append(point("routed", L, 0.5, **of))
        kept = {"budget": "auto", "mean_blocks": 18.5 + place}
        points.append(point("routed auto", 18 + place, 0.45 - 0.02 * place, **of, **kept))
    return record("eval-tasks", {"points": points, "execution": []})


def comparison_record(labels=("(b) SLEB", "(c) SLEB", "(e) searched sets"), tasks=("alpaca",)):
    levels = [
        point(label, depth, 3.0, task=task, metric="answer_nll")
        for task in tasks
        for label in ("(a) Buddy", *labels)
        for depth in (15, 18, 22, 26)
    ]
    gaps = [
        {"task": task, "label": label, "blocks": depth, "rows": 160}
        | {"difference": 0.1 * place - 0.01 * (30 - depth), "stderr": 0.02}
        for task in tasks
        for place, label in enumerate(labels)
        for depth in (15, 18, 22, 26)
    ]
    return record("comparison", {"points": levels, "above_buddy": gaps})


def panels_record(labels=LABELS[:3], panels=3, paper=True):
    """Lines of ours and of the paper's in each of some panels."""

    def made(place, is_paper):
        x = [12.5, 25.0, 37.5, 50.0]
        line = {"label": labels[place], "x": x, "y": [60.0 - place - step for step in x]}
        return {**line, "paper": is_paper, **({} if is_paper else {"stderr": [1.0] * 4})}

    axes = {"x_label": "Blocks removed (%)", "y_label": "Average accuracy (%)"}
    lines = [made(place, is_paper) for is_paper in (False, paper) for place in range(len(labels))]
    each = [{"title": f"Panel {place}", **axes, "lines": lines} for place in range(panels)]
    return record("reproduce-accuracy", {"panels": each})


def bars_record(rows=6, parts=("to 20 %", "20 to 40 %", "40 to 60 %", "60 to 80 %", "above 80 %")):
    values = [100 / len(parts)] * len(parts)
    made = [{"label": f"task number {row}", "values": values} for row in range(rows)]
    bars = {"x_label": "Share of prompts (%)", "parts": list(parts), "rows": made}
    return record("reproduce-budgets", {"bars": bars})


def load_record(label="auto", rates=(2.0, 4.0, 8.0, 16.0), blocks=True):
    """Goodput that follows the load up to a point; depth that falls from there."""
    points = [
        {"offered_rps": rate, "goodput_rps": min(rate, 7.5)}
        | {"blocks_per_token": min(30.0, 200.0 / rate) if blocks else None}
        for rate in rates
    ]
    return record("serving-load", {"points": points}, label=label)


EXAMPLES = {
    "accuracy": [tasks_record()],
    "perplexity": [perplexity_record()],
    "heatmap": [execution_record()],
    "ranks": [ranks_record()],
    "context": [context_record()],
    "speed": [speed_record()],
    "breakdown": [speed_record()],
    "importance": [importance_record("taylor"), importance_record("delta-ppl"), sleb_record()],
    "predictor": [predictor_record(), predictor_record(lambda_cost=1.0)],
    "comparison": [comparison_record()],
    "retention": [auto_record()],
    "panels": [panels_record()],
    "bars": [bars_record()],
    "load": [load_record(), load_record("1.0")],
}
