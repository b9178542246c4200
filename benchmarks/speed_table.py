"""Tables of docs/benchmarks/speed.md and serving.md, from their records.

python benchmarks/speed_table.py
"""

from pathlib import Path
from statistics import mean, stdev

from buddy.lab import experiment
from buddy.records import read_record

RESULTS = Path(__file__).parent.parent / "results"
HEAD = (
    "what runs",
    "tokens/s",
    "x HF",
    "x full",
    "ideal, %",
    "new plan, %",
    "prefill x full",
    "prefill x HF",
)
TITLES = {
    "transformers": "transformers' `generate`",
    "dense": "all 30 blocks",
    "shared 15": "15 blocks, drawn anew, `shared`",
    "independent 15": "15 blocks, drawn anew, `independent`",
    "shared mixed": "eight budgets from 15 to 30, `shared`",
    "independent mixed": "eight budgets from 15 to 30, `independent`",
}
KINDS = {
    "static": "{} blocks, one plan",
    "routed": "{} blocks, the shipped router",
    "random": "{} blocks, drawn anew every step",
    "int8": "int8, {} blocks",
    "int4": "int4, {} blocks",
}
ALONE = (
    "transformers",
    "dense",
    *(f"{kind} {depth}" for depth in (26, 22, 19, 15) for kind in ("static", "routed", "random")),
    *(name for quant in ("int8", "int4") for name in (quant, f"{quant} 15")),
)
TOGETHER = (
    "transformers",
    "dense",
    "static 15",
    "routed 15",
    "shared 15",
    "independent 15",
    "shared mixed",
    "independent mixed",
    *ALONE[-4:],
)


def speed_tables():
    """Tables by depth: what ships at batch 1; with AMX, batch 1, 8, and 1 with a long context."""
    (ships,) = shapes("engine-shipped.json")
    one, eight = shapes("engine.json")
    (long,) = shapes("engine-context-4096.json")
    return (
        table(ships, ALONE),
        table(one, ALONE),
        table(eight, TOGETHER),
        table(long, long["cells"]),
    )


def shapes(name):
    """Measured shapes of a record of `benchmarks/engine.py`."""
    return read_record(RESULTS / name)["results"]["shapes"]


def table(shape, names):
    """One row a subject."""
    return experiment.markdown(HEAD, [row(shape, name) for name in names])


def row(shape, name):
    """Speed, ratios, and how often the plan changed."""
    cell, batch = shape["cells"][name], shape["batch"]
    kind, _, depth = name.partition(" ")
    ideal = cell.get("decode_of_ideal")
    return (
        TITLES.get(name) or KINDS[kind].format(depth or "all 30"),
        f"{batch / cell['decode_s']:,.0f}",
        f"{cell['decode_over_transformers']:.1f}",
        f"{cell['decode_over_dense']:.2f}",
        "" if ideal is None else f"{ideal * 100:.0f}",
        "" if ideal is None else f"{cell['changed'] * 100:.0f}",
        f"{cell['prefill_over_dense']:.2f}",
        f"{cell['prefill_over_transformers']:.1f}",
    )


def goodput_rows():
    """Rate that was offered, and good answers a second and blocks a token of three servers."""
    runs = [
        read_record(RESULTS / "serving" / f"{name}.json")["results"]["points"]
        for name in ("full", "half", "controller")
    ]
    for rate in sorted({point["rate"] for point in runs[0]}):
        at_rate = [[point for point in run if point["rate"] == rate] for run in runs]
        offered = mean(point["offered_rps"] for point in at_rate[0])
        yield f"{offered:.1f}", *map(goodput_cell, at_rate)


def goodput_table():
    """Those rows; ± is the error of the mean."""
    head = ("requests/s", "all blocks, always", "half, always", "the controller")
    return experiment.markdown(head, list(goodput_rows()))


BESIDE = ("full", "half", "controller", "vllm", "llama.cpp")
"""Records of servers on the same machine, as benchmarks/goodput.py names them."""


def beside_table():
    """One row a server and rate: good answers a second, and how long tokens took."""
    head = (
        *("requests/s", "server", "good answers/s", "good of all", "refused", "blocks a token"),
        *("first token, p50 / p99, s", "between tokens, p50 / p99, ms"),
    )
    return experiment.markdown(head, list(beside_rows()), texts=2)


def beside_rows():
    """Those rows, by rate; times are means over the repeats."""
    records = [read_record(RESULTS / "serving" / "beside" / f"{name}.json") for name in BESIDE]
    for rate in sorted({point["rate"] for point in records[0]["results"]["points"]}):
        for record in records:
            points = [p for p in record["results"]["points"] if p["rate"] == rate]
            offered = mean(point["offered_rps"] for point in points)
            good, _, blocks = goodput_cell(points).partition(" at ")
            refused = sum(point["refused"] for point in points)
            asked = sum(point["requests"] for point in points)
            first, between = (
                " / ".join(
                    f"{mean(p[f'{kind}_ms_p{share}'] for p in points) / per:,.{digits}f}"
                    for share in (50, 99)
                )
                for kind, per, digits in (("ttft", 1000, 2), ("itl", 1, 0))
            )
            kept = sum(round(point["goodput_rps"] * point["lasted_s"]) for point in points)
            yield (
                *(f"{offered:.1f}", record["config"]["label"], good, f"{kept} of {asked}"),
                *(str(refused), blocks, first, between),
            )


def goodput_cell(points):
    """Good answers a second and blocks a token of some repeats."""
    good = [point["goodput_rps"] for point in points]
    error = stdev(good) / len(good) ** 0.5
    blocks = [p["blocks_per_token"] for p in points if p["blocks_per_token"] is not None]
    return (
        f"{mean(good):.1f} ± {error:.1f} at {mean(blocks):.0f}"
        if blocks
        else (f"{mean(good):.1f} ± {error:.1f}")
    )


if __name__ == "__main__":
    print("\n\n".join((*speed_tables(), goodput_table(), beside_table())))
