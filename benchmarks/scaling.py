"""What would larger models on GPUs cost, by depth and batch? Arithmetic, and no measurement.

A step's time follows from the bytes that it reads, the FLOPs that it computes and what its ranks
tell one another. The tables are those of docs/benchmarks/scaling.md. The last one puts the
constants of a machine that was measured into the same formula, beside what was measured there.

    python benchmarks/scaling.py --out results/scaling/arithmetic.json
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from buddy.depth.cost import ModelShape, kv_bytes_per_token, plan_flops
from buddy.lab import experiment
from buddy.records import read_record
from buddy.serving.control.protocol import StepShape

ROOT = Path(__file__).parents[1]
DEPTHS = (1.0, 0.75, 0.5)
CONTEXT = 1000
"""Tokens that a row of a decode step looks at."""
CLASSES = (0.5, 0.75, 1.0)
"""Budgets of a mixed batch, as many rows of each."""
PROMPT, ANSWER = 512, 128
"""Tokens of a request, where a number of GPUs is asked for."""
ITLS_S = (0.025, 0.010)
"""The longest steps there."""
BUSY = 0.7
"""Share of the time that a GPU works, so that queues stay short."""


def llama(hidden, inner, blocks, heads, kv_heads, vocab, *, tied=False):
    """The counts of a Llama in bfloat16, heads of 128 (or `hidden / heads`)."""
    size = hidden // heads
    attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    head = vocab * hidden
    return ModelShape(
        num_blocks=blocks,
        block_params=attention + 3 * hidden * inner + 2 * hidden,
        outside_params=(1 if tied else 2) * head + hidden,
        head_params=head,
        query_width=heads * size,
        kv_width=kv_heads * size,
        bytes_per_param=2.0,
        bytes_per_kv=2.0,
    )


MODELS = {
    "Llama-3-8B": llama(4096, 14336, 32, 32, 8, 128256),
    "Llama-3-70B": llama(8192, 28672, 80, 64, 8, 128256),
    "SmolLM2-135M": llama(576, 1536, 30, 9, 3, 49152, tied=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One accelerator, and the links to the others of its group."""

    read_bytes_per_s: float
    """That a step reaches when it reads weights and cache."""
    flops_per_s: float
    """That its products reach."""
    step_s: float
    """What a step takes whatever it does: launches, sampling, the host."""
    memory_bytes: float = math.inf
    """Room for weights and cache."""
    link_bytes_per_s: float = math.inf
    """Speed of the links to the others, one way."""
    reduce_s: float = 0.0
    """Time of one all-reduce, however small."""


H100 = Machine(
    read_bytes_per_s=0.8 * 3.35e12,
    flops_per_s=0.6 * 989e12,
    step_s=1e-3,
    memory_bytes=0.9 * 80e9,
    link_bytes_per_s=0.8 * 450e9,
    reduce_s=10e-6,
)
"""SXM. The data sheet's 3.35 TB/s, 989 dense bfloat16 TFLOP/s, 80 GB and 450 GB/s each way; the
shares of them that are reached, and both fixed times, are assumed."""
GROUPS = {"Llama-3-8B": 1, "Llama-3-70B": 8}
"""GPUs that hold one model, tensor parallel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Where the seconds of a step go."""

    fixed: float
    linear: float
    """Projections and MLPs of the blocks: the longer of reading weights and multiplying."""
    attention: float
    """Likewise of the cache and its products."""
    head: float
    """Output projection."""
    reduce: float
    """Two all-reduces a block that runs."""

    @property
    def total(self) -> float:
        """Seconds."""
        return self.fixed + self.linear + self.attention + self.head + self.reduce


def step_parts(step: StepShape, model: ModelShape, machine: Machine, ranks: int = 1) -> Parts:
    """Seconds of one step, of answers and of prompts that are fed along.

    Within each part, reading and computing overlap perfectly; parts follow one another. The head
    is read for all rows, and once for prompts.

    Args:
        step: Its counts. A prompt's token looks at half of the tokens that are fed.
        model: Whose step it is.
        machine: Of each rank.
        ranks: That share every block, tensor parallel.
    """
    read, compute = machine.read_bytes_per_s * ranks, machine.flops_per_s * ranks
    lane_blocks = step.row_blocks + step.prompt_blocks
    looked = step.block_context + step.prompt_blocks * step.prompt_lanes / 2
    last = step.rows + (1 if step.prompt_lanes else 0)
    cached = step.block_context * 2 * model.kv_width * model.bytes_per_kv
    # Bytes of one all-reduce a block.
    exchanged = lane_blocks * model.query_width * 2 * 2 * (ranks - 1) / ranks
    return Parts(
        fixed=machine.step_s,
        linear=max(
            step.union * model.block_params * model.bytes_per_param / read,
            lane_blocks * 2 * model.block_params / compute,
        ),
        attention=max(cached / read, looked * 4 * model.query_width / compute),
        head=max(
            model.head_params * model.bytes_per_param / read,
            last * 2 * model.head_params / compute,
        ),
        reduce=(
            2 * (step.union * machine.reduce_s + exchanged / machine.link_bytes_per_s)
            if ranks > 1
            else 0.0
        ),
    )


def blocks(model, share):
    """A depth in blocks."""
    return round(share * model.num_blocks)


def decode(model, depths, context=CONTEXT, union=None):
    """A decode step of rows of these depths; nested plans, unless a mean union is named."""
    shape = StepShape.of_rows(depths, [context] * len(depths))
    return shape if union is None else replace(shape, union=round(union))


def union_of_independent(depths: Sequence[int], num_blocks: int) -> float:
    """Blocks that any row runs, on average, if rows choose theirs at random, first and last aside.

    Args:
        depths: Of the rows, first and last block included.
        num_blocks: Of the model, above 2.
    """
    skipped = math.prod(1 - (depth - 2) / (num_blocks - 2) for depth in depths)
    return 2 + (num_blocks - 2) * (1 - skipped)


def table(title, head, rows):
    """Print a table as the page has it."""
    print(f"\n**{title}**\n", experiment.markdown(head, rows), sep="\n")


def percent(share):
    """A share, as the page writes it."""
    return f"{100 * share:.0f} %"


def ms(seconds):
    """Milliseconds, three figures."""
    value = 1e3 * seconds
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def sizes():
    """Parameters, and bytes of weights and cache."""
    found = {}
    for name, ranks in GROUPS.items():
        model = MODELS[name]
        params = model.num_blocks * model.block_params + model.outside_params
        free = ranks * H100.memory_bytes - 2 * params
        found[name] = {
            "gpus": ranks,
            "params": params,
            "weight_bytes": 2 * params,
            "head_share": model.head_params
            / (model.num_blocks * model.block_params + model.head_params),
            "cache_bytes": free,
            "by_depth": {
                str(share): {
                    "kv_bytes_per_token": kv_bytes_per_token(model, blocks(model, share)),
                    "tokens_in_cache": int(free // kv_bytes_per_token(model, blocks(model, share))),
                }
                for share in DEPTHS
            },
        }
    table(
        "Memory, where a plan is fixed at admission",
        [
            "",
            "GPUs",
            "weights, GB",
            "left for KV, GB",
            *(f"KB a token at {percent(share)}" for share in DEPTHS),
            *(f"tokens held at {percent(share)}" for share in DEPTHS),
        ],
        [
            [
                name,
                size["gpus"],
                f"{size['weight_bytes'] / 1e9:.1f}",
                f"{size['cache_bytes'] / 1e9:.0f}",
                *(f"{cell['kv_bytes_per_token'] / 1e3:.0f}" for cell in size["by_depth"].values()),
                *(f"{cell['tokens_in_cache']:,}" for cell in size["by_depth"].values()),
            ]
            for name, size in found.items()
        ],
    )
    return found


def decode_steps():
    """A decode step by depth and batch."""
    found = {}
    for name, ranks in GROUPS.items():
        model = MODELS[name]
        found[name] = {}
        for batch in (1, 8, 64, 256):
            parts = {
                str(share): step_parts(
                    decode(model, [blocks(model, share)] * batch), model, H100, ranks
                )
                for share in DEPTHS
            }
            found[name][str(batch)] = {
                share: {**asdict(part), "total": part.total} for share, part in parts.items()
            }
        table(
            f"A decode step of {name} on {ranks} H100, ms",
            [
                "batch",
                *(f"{percent(share)} of the blocks" for share in DEPTHS),
                "full over half",
                "of a full step: blocks",
                "KV",
                "head",
                "all-reduce",
                "fixed",
            ],
            [
                [
                    batch,
                    *(ms(cell["total"]) for cell in cells.values()),
                    f"{cells['1.0']['total'] / cells['0.5']['total']:.2f}",
                    *(
                        percent(cells["1.0"][part] / cells["1.0"]["total"])
                        for part in ("linear", "attention", "head", "reduce", "fixed")
                    ),
                ]
                for batch, cells in found[name].items()
            ],
        )
    return found


def prefills():
    """A prompt alone, by depth."""
    found = {}
    for name, ranks in GROUPS.items():
        model = MODELS[name]
        found[name] = {}
        for tokens in (128, 1024, 8192):
            found[name][str(tokens)] = {
                str(share): step_parts(
                    StepShape(
                        union=blocks(model, share),
                        prompt_lanes=tokens,
                        prompt_blocks=tokens * blocks(model, share),
                    ),
                    model,
                    H100,
                    ranks,
                ).total
                for share in DEPTHS
            }
    table(
        "A prompt alone, ms",
        ["", "tokens", *(percent(share) for share in DEPTHS), "full over half"],
        [
            [
                name,
                f"{int(tokens):,}",
                *(ms(seconds) for seconds in cells.values()),
                f"{cells['1.0'] / cells['0.5']:.2f}",
            ]
            for name, by_tokens in found.items()
            for tokens, cells in by_tokens.items()
        ],
    )
    return found


def grouping():
    """A decode step of one class and of mixed ones, with plans of one order and of each row's."""
    found = {}
    for name, ranks in GROUPS.items():
        model = MODELS[name]
        found[name] = {}
        for batch in (3, 9, 63, 255):

            def seconds(depths, union=None, model=model, ranks=ranks):
                return step_parts(decode(model, depths, union=union), model, H100, ranks).total

            half = [blocks(model, 0.5)] * batch
            mixed = [blocks(model, share) for share in CLASSES] * (batch // len(CLASSES))
            alone = [seconds([blocks(model, share)] * batch) for share in CLASSES]
            found[name][str(batch)] = {
                "full": seconds([model.num_blocks] * batch),
                "half_independent": seconds(half, union_of_independent(half, model.num_blocks)),
                "half_nested": seconds(half),
                "mixed_nested": seconds(mixed),
                "grouped": sum(alone) / len(alone),
            }
    table(
        "A decode step by what a batch holds, ms",
        [
            "",
            "batch",
            "all at 100 %",
            "all at 50 %, plans of their own",
            "all at 50 %, one order",
            "50, 75 and 100 % mixed, one order",
            "a batch for each class, mean",
            "grouping saves",
        ],
        [
            [
                name,
                batch,
                *(ms(seconds) for seconds in cells.values()),
                percent(1 - cells["grouped"] / cells["mixed_nested"]),
            ]
            for name, by_batch in found.items()
            for batch, cells in by_batch.items()
        ],
    )
    return found


def batch_in_time(model, ranks, shares, itl_s):
    """The largest batch whose cache fits and whose step is in time, and that step's seconds.

    Rows have half of their answers, and room for all of them. Skipped blocks hold no cache.

    Args:
        model: Whose steps they are.
        ranks: GPUs of a group.
        shares: Budgets of the rows, as many of each.
        itl_s: The longest step.
    """
    depths = [blocks(model, share) for share in shares]
    params = model.num_blocks * model.block_params + model.outside_params
    free = ranks * H100.memory_bytes - params * model.bytes_per_param
    each = sum((PROMPT + ANSWER) * kv_bytes_per_token(model, depth) for depth in depths)

    def seconds(times):
        step = decode(model, depths * times, PROMPT + ANSWER // 2)
        return step_parts(step, model, H100, ranks).total

    times = int(free // each)
    while times > 1 and seconds(times) > itl_s:
        times -= 1
    return times * len(depths), seconds(times)


def gpus_for(model, ranks, shares, itl_s, rate):
    """GPUs that answer so many requests a second, of budgets that share every batch.

    Prompts are fed many at a time, and each looks at itself alone.
    """
    many = 16
    depths = [blocks(model, share) for share in shares]
    rows, seconds = batch_in_time(model, ranks, shares, itl_s)
    prompts = StepShape(
        union=max(depths),
        prompt_lanes=PROMPT,
        prompt_blocks=round(many * PROMPT * sum(depths) / len(depths)),
    )
    prompt_s = step_parts(prompts, model, H100, ranks).total / many
    answer_s = ANSWER * seconds / rows
    return {
        "rows": rows,
        "step_s": seconds,
        "prompt_s": prompt_s,
        "answer_s": answer_s,
        "gpus": rate * (prompt_s + answer_s) * ranks / BUSY,
    }


def fleet(rate=10_000):
    """GPUs for so many requests a second, by depth and by the promised time between tokens."""
    found = {}
    for name, ranks in GROUPS.items():
        for itl_s in ITLS_S:
            cells = {
                percent(share): gpus_for(MODELS[name], ranks, (share,), itl_s, rate)
                for share in DEPTHS
            }
            cells["mixed"] = gpus_for(MODELS[name], ranks, CLASSES, itl_s, rate)
            parted = sum(cells[percent(share)]["gpus"] for share in CLASSES) / len(CLASSES)
            found[f"{name}, {1e3 * itl_s:.0f} ms"] = cells | {"grouped": {"gpus": parted}}
    table(
        f"GPUs for {rate:,} requests a second, {PROMPT} tokens in and {ANSWER} out",
        [
            "",
            *(f"all at {percent(share)}" for share in DEPTHS),
            "50, 75 and 100 % mixed",
            "a group for each class",
            "answers at once, at 100 %",
            "at 50 %",
            "a prompt at 100 % takes, ms",
            "an answer, ms",
        ],
        [
            [
                what,
                *(f"{math.ceil(cell['gpus']):,}" for cell in cells.values()),
                cells["100 %"]["rows"],
                cells["50 %"]["rows"],
                ms(cells["100 %"]["prompt_s"]),
                ms(cells["100 %"]["answer_s"]),
            ]
            for what, cells in found.items()
        ],
    )
    return found


def measured_machine(dense, context):
    """The constants of the machine of a record, from one row's dense steps and prompt.

    Args:
        dense: The record's cell of full depth at batch 1.
        context: Tokens of its prompt.

    Returns:
        The machine, and the measured seconds of the output projection.
    """
    model = MODELS["SmolLM2-135M"]
    read = model.num_blocks * model.block_params * model.bytes_per_param
    read += context * kv_bytes_per_token(model)
    machine = Machine(
        read_bytes_per_s=read / dense["blocks_s"],
        flops_per_s=plan_flops(model, model.num_blocks, context, context // 2) / dense["prefill_s"],
        step_s=dense["mean_s"] - dense["blocks_s"] - dense["head_s"],
    )
    return machine, dense["head_s"]


def checked(engine, beside):
    """What the formula predicts of a small model on two cores, and what was measured there.

    All constants come from full depth at batch 1; each measured ratio is to full depth at batch 1
    of the same record.

    Args:
        engine: A record of `benchmarks/engine.py`.
        beside: A record of `benchmarks/beside_others.py`.
    """
    model = MODELS["SmolLM2-135M"]
    cells = {cell["batch"]: cell["cells"] for cell in read_record(engine)["results"]["shapes"]}
    machine, head_s = measured_machine(cells[1]["dense"], 256)
    others = {
        (cell["engine"], cell["batch"]): cell["batch"] / cell["tokens_per_s"]
        for cell in read_record(beside)["results"]["cells"]
        if cell["phase"] == "decode"
    }

    def predicted(depths, union=None):
        parts = step_parts(decode(model, depths, 256, union), model, machine)
        return parts.total - parts.head + head_s

    mixed = [15, 17, 19, 21, 24, 26, 28, 30]
    single, eight = cells[1], cells[8]
    cases = [
        *(
            (f"1 row, {depth} blocks", [depth], None, single[f"static {depth}"]["decode_s"], single)
            for depth in (26, 22, 19, 15)
        ),
        ("8 rows, 30 blocks", [30] * 8, None, eight["dense"]["decode_s"], single),
        ("8 rows, 15 blocks, one order", [15] * 8, None, eight["shared 15"]["decode_s"], single),
        (
            "8 rows, 15 blocks, plans of their own",
            [15] * 8,
            eight["independent 15"]["read"],
            eight["independent 15"]["decode_s"],
            single,
        ),
        ("8 rows, 15 to 30 blocks", mixed, None, eight["shared mixed"]["decode_s"], single),
        *(
            (
                f"{rows} row{'s' * (rows > 1)}, {depth} blocks, another day",
                [depth] * rows,
                None,
                others[key],
                None,
            )
            for rows in (1, 8, 32)
            for depth, key in ((30, ("buddy", rows)), (15, ("buddy, 15 blocks", rows)))
            if (rows, depth) != (1, 30)
        ),
    ]
    full, rows = predicted([30]), []
    for what, depths, union, measured, record in cases:
        base = others["buddy", 1] if record is None else record["dense"]["decode_s"]
        rows.append(
            {
                "what": what,
                "predicted": predicted(depths, union) / full,
                "measured": measured / base,
            }
        )
    table(
        "Time of a step, relative to 1 row and 30 blocks, SmolLM2-135M on two cores",
        ["", "predicted", "measured"],
        [[row["what"], f"{row['predicted']:.2f}", f"{row['measured']:.2f}"] for row in rows],
    )
    constants = {
        "read_bytes_per_s": machine.read_bytes_per_s,
        "flops_per_s": machine.flops_per_s,
        "step_s": machine.step_s,
        "head_s": head_s,
    }
    return {"machine": constants, "rows": rows}


def compute():
    """Every table, shown, and its figures."""
    return {
        "sizes": sizes(),
        "decode": decode_steps(),
        "prefill": prefills(),
        "grouping": grouping(),
        "fleet": fleet(),
        "checked": checked(
            ROOT / "results" / "engine.json", ROOT / "results" / "beside-others.json"
        ),
    }


def main():
    """Compute, show, record."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("--out", type=Path, help="record to write; without it tables alone")
    args = parser.parse_args()
    results = compute()
    if args.out is not None:
        config = {"gpu": asdict(H100), "models": {n: asdict(m) for n, m in MODELS.items()}}
        config |= {"context": CONTEXT, "prompt": PROMPT, "answer": ANSWER, "itls_s": ITLS_S}
        config |= {"busy": BUSY, "groups": GROUPS}
        experiment.save(args.out, "scaling", results, config=config)


if __name__ == "__main__":
    experiment.run(main)
