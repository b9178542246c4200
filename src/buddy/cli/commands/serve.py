"""`buddy serve`: an OpenAI-compatible server in which each request may name a budget."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.errors import ServingError
from buddy.hub.presets import ROUTED_MODEL
from buddy.settings import Range

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.serving.client import EngineClient

_NEEDED: Final = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx")
_MILLISECONDS: Final = Range(above=0, high=1e7)


def _check_efforts(text: str) -> None:
    from buddy.serving.http.budget_rules import parse_efforts

    for budget in parse_efforts(text).values():
        options.check_answer_budget(budget)


def serve(
    model: Annotated[
        str, typer.Argument(help="Preset, hub id, folder, GGUF file or Buddy checkpoint.")
    ] = ROUTED_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen at; one that others reach needs keys.")
    ] = "127.0.0.1",
    port: Annotated[
        int, options.number(Range(0, 65535), help="Port to listen at; 0 takes a free one.")
    ] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the keys that are taken, one a line.")
    ] = None,
    max_rows: Annotated[
        int, options.number(Range(1, 1024), help="Answers that are made at once.")
    ] = 32,
    max_queue: Annotated[int, options.count(0, help="Requests that may wait; more get 429.")] = 128,
    slo_ttft_ms: Annotated[
        float | None,
        options.number(_MILLISECONDS, help="Promised time to the first token; else 429."),
    ] = None,
    slo_itl_ms: Annotated[
        float | None,
        options.number(
            _MILLISECONDS, help="Target of the time between tokens; elastic budgets are lowered."
        ),
    ] = None,
    min_budget: Annotated[
        str | None,
        options.checked(options.check_budget, help="Elastic budgets are never lowered below it."),
    ] = None,
    effort_budgets: Annotated[
        str | None,
        options.checked(
            _check_efforts,
            help="Budgets of reasoning_effort, such as low=0.5,medium=0.7,high=1.0.",
        ),
    ] = None,
    default_budget: Annotated[
        str | None,
        options.checked(
            options.check_answer_budget,
            help="Of requests that name none. Full depth if not given.",
        ),
    ] = None,
    batch_route: Annotated[
        Literal["shared", "independent"],
        typer.Option(help="shared: one ranking for all rows; independent: one for each."),
    ] = "shared",
    drain_s: Annotated[
        float,
        options.number(Range(0, 3600), help="Seconds that SIGTERM leaves answers to finish."),
    ] = 30.0,
    max_body_mb: Annotated[
        float, options.number(Range(0.001, 1024), help="Largest body of a request, in MB.")
    ] = 2.0,
    kv_policy: options.KVPolicy = None,
    policy: options.Policy = None,
    engine: options.Engine = "auto",
    quant: options.Quant = None,
) -> None:
    """Serve a model to OpenAI's clients, with a budget a request.

    SIGTERM and Ctrl-C let answers finish, and then end the server.
    """
    _check_installed()
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.cli.views.display import stderr
    from buddy.serving.http.app import Service, make_app
    from buddy.serving.http.auth import Keys
    from buddy.serving.http.budget_rules import BudgetRules, parse_efforts
    from buddy.serving.http.guards import Patience
    from buddy.serving.http.prompts import PromptReader
    from buddy.serving.http.server import Address, check_reach, listen
    from buddy.serving.http.server import serve as answer

    console = stderr()
    keys = None if api_key_file is None else Keys.read(api_key_file)
    address = Address(host=host, port=port)
    check_reach(address, has_keys=keys is not None)
    patience = Patience(body_bytes=int(max_body_mb * 1e6))

    def rules_of(outline: Any) -> BudgetRules:
        return BudgetRules(
            num_blocks=outline.num_blocks,
            has_predictor=outline.predictor is not None,
            means=None if outline.ledger is None else outline.ledger.range,
            min_budget=min_budget,
            num_pinned=outline.policy.num_pinned,
            default=default_budget,
            efforts={} if effort_budgets is None else parse_efforts(effort_budgets),
        )

    with listen(address) as listener:  # before a model is loaded: a port in use is said at once
        from buddy.cli.loading import load_checked
        from buddy.serving.control.admission import AdmissionConfig
        from buddy.serving.control.controller import ControlConfig
        from buddy.serving.start import start_engine

        loaded = load_checked(
            model,
            rules_of,
            console,
            policy=policy,
            kv_policy=kv_policy,
            engine=engine,
            merge_adapter=True,
            quant=quant,
        )
        tokenizer = load_tokenizer(model)
        client = start_engine(
            loaded,
            tokenizer,
            model,
            ControlConfig(
                num_blocks=loaded.num_blocks,
                min_blocks=rules_of(loaded).floor(),
                max_rows=max_rows,
                itl_ms=slo_itl_ms,
            ),
            AdmissionConfig(max_queue=max_queue, ttft_ms=slo_ttft_ms),
            batch_route=batch_route,
        )
        reader = PromptReader(tokenizer, loaded.config.vocab_size)
        service = Service(engine=client, reader=reader, rules=rules_of(loaded))
        app = make_app(service, keys=keys, patience=patience)
        limits = {
            "rows at once": str(max_rows),
            "queue": str(max_queue),
            "time to first token": _target(slo_ttft_ms),
            "time between tokens": _target(slo_itl_ms),
            "keys": "none: this machine alone" if keys is None else str(api_key_file),
        }
        show_panel(console, listener, client, limits)
        answer(app, service, listener, drain_s=drain_s)


def show_panel(
    console: "Console", listener: Any, client: "EngineClient", limits: dict[str, str]
) -> None:
    """Where the server is, and what it runs; a line each where nobody watches."""
    from rich import box
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from buddy.serving.http.server import url_of

    facts = client.facts
    rows = {
        "address": url_of(listener),
        "model": f"{facts.model}, {facts.num_blocks} blocks, context {facts.context:,}",
        "engine": facts.engine,
        "fastest": f"{facts.least_ms_per_token:.3g} ms a token at the smallest budget",
        **limits,
    }
    if not console.is_terminal:
        for name, value in rows.items():
            console.print(f"{name}: {value}", soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), value)
    console.print(Panel(table, title="buddy serve", box=box.ROUNDED, expand=False))
    console.print("Ctrl-C lets answers finish; a second one ends at once", style="dim")


def _target(ms: float | None) -> str:
    return "no promise" if ms is None else f"{ms:g} ms"


def _check_installed() -> None:
    """Refuse where the extra is missing.

    Raises:
        ServingError: It is.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ServingError(
            f"buddy serve needs {', '.join(missing)}: pip install 'buddy-llm[serve]'"
        )


COMMAND = Command(name="serve", group="serve", place=1, run=serve)
