"""What `buddy route` found, as tables: losses by kind of prompt, and the plans of each group."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from buddy.cli.views.tables import name_column, plain_table, show_table
from buddy.errors import shown

if TYPE_CHECKING:
    from rich.console import Console

_WAYS = ("full", "prior", "searched", "single", "routed", "hindsight")


def show_route(console: "Console", record: Mapping[str, Any]) -> None:
    """Print the tables of a record.

    Args:
        console: Where to.
        record: As `buddy route` writes it.
    """
    results, num_blocks = record["results"], record["config"]["num_blocks"]
    for compared in results["tables"]["groups"]:
        _show(console, compared, num_blocks, "")
    for compared in results["tables"].get("others", ()):
        _show(console, compared, num_blocks, ", prompts of no group")
    fewest = results["tables"]["groups"][-1]["blocks"]
    _show_orders(console, results, num_blocks - fewest)
    spent = (results.get("ledger") or {}).get("means", ())
    if spent:
        _show_ledger(console, spent)
    console.print(
        "Gains are those of the best order for these prompts over that of "
        f"{_name(results['common'])}, which the others have, on rows that were not searched on.\n",
        style="dim",
    )
    console.print(
        "Nats a token of rows that no order and no router was chosen on. full: at full depth; "
        "prior: by the order that the model had; searched: by the one searched on all prompts; "
        "single: by the best one order for all these rows, and hindsight: by the best for each "
        "answer, both told by these very answers; gain: of routed over single, ± its paired "
        "standard error.",
        style="dim",
    )
    if spent:
        console.print(
            "\nOf the ledger: one order: that of all prompts, every token at the mean; ledger: "
            "under it, the mean spent by what each token gains; both: so under the router; gain: "
            "of both over routed, ± its paired standard error. Without the answers' first tokens.",
            style="dim",
        )


def _show(console: "Console", compared: Mapping[str, Any], num_blocks: int, what: str) -> None:
    table = plain_table(f"{compared['blocks']} of {num_blocks} blocks{what}")
    name_column(table, "prompts")
    for way in (*_WAYS, "gain"):
        table.add_column(way, justify="right", no_wrap=True)
    rows: Sequence[tuple[str, Mapping[str, Any]]] = [
        *compared["by_source"].items(),
        ("mean", compared),
    ]
    for name, row in rows:
        gain = f"{row['gain']:+.3f} ± {row['gain_error']:.3f}"
        table.add_row(_name(name), *(f"{row[way]:.3f}" for way in _WAYS), gain)
    show_table(console, table)
    console.print()


def _show_orders(console: "Console", results: Mapping[str, Any], removed: int) -> None:
    table = plain_table("Blocks left out, first to last")
    name_column(table, "prompts")
    table.add_column("blocks")
    table.add_column("gain", justify="right", no_wrap=True)
    for name, order in results["orders"].items():
        found = results["confirmed"].get(name)
        said = ""
        if found is not None:
            whose = "" if found["order"] == name else f", by that of {_name(found['order'])}"
            so = "" if found["is_kept"] or found["order"] == results["common"] else ", not kept"
            said = f"{found['gain']:+.3f} ± {found['error']:.3f}{whose}{so}"
        table.add_row(_name(name), " ".join(map(str, order[:removed])), said)
    show_table(console, table)
    console.print()


def _show_ledger(console: "Console", spent: Sequence[Mapping[str, Any]]) -> None:
    table = plain_table("Means, spent by the ledger")
    for name in ("mean", "prompt", "one order", "ledger", "routed", "both", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in spent:
        losses = (f"{case[way]:.3f}" for way in ("single", "alone", "routed", "both"))
        gain = f"{case['gain']:+.3f} ± {case['gain_error']:.3f}"
        table.add_row(str(case["mean"]), str(case["prompt"]), *losses, gain)
    show_table(console, table)
    console.print()


def _name(text: str) -> str:
    """A name that anybody may have given, on one line."""
    return shown(text, 40)[1:-1]
