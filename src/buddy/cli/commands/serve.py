"""`buddy serve`: an OpenAI-compatible server in which each request may name a budget."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from buddy.budget.blocks import least_blocks
from buddy.budget.request import Blocks, BudgetRequest, read_blocks, read_budget
from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.named import BUDGETS, offer
from buddy.errors import BudgetError, PolicyError, ServingError
from buddy.generation.drafts import Drafts, read_drafts
from buddy.hub.presets import ROUTED_MODEL
from buddy.settings import Range

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.depth.policy import Policy
    from buddy.engine.steer import BatchRoute
    from buddy.serving.client import EngineClient
    from buddy.serving.http.budget_rules import BudgetRules

_NEEDED: Final = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx")
_MILLISECONDS: Final = Range(above=0, high=1e7)


def _read_efforts(text: str) -> dict[str, BudgetRequest]:
    from buddy.serving.http.budget_rules import parse_efforts

    return parse_efforts(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenOptions:
    """Where the server is reached, and by whom."""

    host: Annotated[
        str, typer.Option(help="Address to listen at; one that others reach needs keys.")
    ] = "127.0.0.1"
    port: Annotated[
        int, options.number(Range(0, 65535), help="Port to listen at; 0 takes a free one.")
    ] = 8000
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the keys that are taken, one a line. No key if not given."),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Origin of web pages that may ask, such as https://chat.example, or *; repeat "
            "for several. None but the server's own if not given.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityOptions:
    """How much is taken on at once, and what is promised of it."""

    max_rows: Annotated[
        int, options.number(Range(1, 1024), help="Answers that are made at once.")
    ] = 32
    max_queue: Annotated[int, options.count(0, help="Requests that may wait; more get 429.")] = 128
    slo_ttft_ms: Annotated[
        float | None,
        options.number(
            _MILLISECONDS, help="Promised time to the first token; else 429. None if not given."
        ),
    ] = None
    slo_itl_ms: Annotated[
        float | None,
        options.number(
            _MILLISECONDS,
            help="Target of the time between tokens; elastic budgets are lowered. None if not "
            "given.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRuleOptions:
    """What budgets mean that a request leaves open."""

    min_budget: Annotated[
        Blocks | None,
        options.read_by(
            read_blocks,
            help="Elastic budgets are never lowered below it. As low as the policy goes if not "
            "given.",
            autocompletion=offer(*BUDGETS[:5]),
        ),
    ] = None
    effort_budgets: Annotated[
        dict[str, BudgetRequest] | None,
        options.read_by(
            _read_efforts,
            help="Budgets of reasoning_effort, such as low=0.5,medium=0.7,high=1.0. It says "
            "nothing if not given.",
        ),
    ] = None
    default_budget: Annotated[
        BudgetRequest | None,
        options.read_by(
            read_budget,
            help="Of requests that name none. Full depth if not given.",
            autocompletion=offer(*BUDGETS),
        ),
    ] = None

    def rules(self, model: Any) -> "BudgetRules":
        """The rules of a model, of which the outline is enough."""
        from buddy.serving.http.budget_rules import BudgetRules

        return BudgetRules(
            num_blocks=model.num_blocks,
            has_predictor=model.predictor is not None,
            means=None if model.ledger is None else model.ledger.range,
            find_marks=lambda: model.thinking_marks,
            min_budget=self.min_budget,
            num_pinned=model.policy.num_pinned,
            default=self.default_budget,
            efforts=self.effort_budgets or {},
        )


@options.on_device
@options.grouped
def serve(
    *,
    model: options.Model = ROUTED_MODEL,
    listening: ListenOptions,
    capacity: CapacityOptions,
    budget_rules: BudgetRuleOptions,
    batch_route: Annotated[
        Literal["shared", "independent"],
        typer.Option(
            help="independent: a ranking for each row; shared: one for all, which reads fewer "
            "weights."
        ),
    ] = "independent",
    drafts: Annotated[
        Drafts | None,
        options.read_by(
            read_drafts,
            "--drafts",
            help="Of requests that name none: draft tokens and verify them together while it pays; "
            "the text is the same. ngram drafts what followed the last tokens before, 0.4 what the "
            "model says at 40 % of its blocks, ngram+0.4 does both. None if not given.",
            autocompletion=offer("ngram", "ngram+0.4", "0.4"),
        ),
    ] = None,
    drain_s: Annotated[
        float,
        options.number(Range(0, 3600), help="Seconds that SIGTERM leaves answers to finish."),
    ] = 30.0,
    max_body_mb: Annotated[
        float, options.number(Range(0.001, 1024), help="Largest body of a request, in MB.")
    ] = 2.0,
    execution: options.ExecutionOptions,
) -> None:
    """Serve a model to OpenAI's clients, with a budget a request.

    SIGTERM and Ctrl-C let answers finish, and then end the server.

    Example: `buddy serve --default-budget 0.6 --port 8080`
    """
    _check_installed()
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.loading import load_to_run
    from buddy.cli.views.display import stderr
    from buddy.serving.http.app import check_origins, make_app
    from buddy.serving.http.auth import Keys
    from buddy.serving.http.defaults import Defaults
    from buddy.serving.http.guards import Patience
    from buddy.serving.http.prompts import PromptReader
    from buddy.serving.http.server import Address, check_reach, listen
    from buddy.serving.http.server import serve as answer
    from buddy.serving.http.service import Service

    console, key_file = stderr(), listening.api_key_file
    keys = None if key_file is None else Keys.read(key_file)
    address = Address(host=listening.host, port=listening.port)
    check_reach(address, has_keys=keys is not None)
    origins = check_origins(listening.allow_origin or ())
    patience = Patience(body_bytes=int(max_body_mb * 1e6))
    with listen(address) as listener:  # before a model is loaded: a port in use is said at once
        resolved = resolve(model)
        loaded = load_to_run(resolved, budget_rules.rules, console, execution)
        _check_drafts(drafts, loaded.policy)
        tokenizer, rules = resolved.load_tokenizer(), budget_rules.rules(loaded)
        defaults = Defaults.read(loaded.generation_config, drafts)
        client = _start(loaded, tokenizer, model, capacity, rules, batch_route)
        reader = PromptReader(tokenizer, loaded.config.vocab_size, client.facts.context)
        service = Service(engine=client, reader=reader, rules=rules, defaults=defaults)
        app = make_app(service, keys=keys, patience=patience, origins=origins)
        show_panel(console, listener, client, _limits(capacity, key_file))
        is_whole = answer(app, service, listener, drain_s=drain_s)
    if not is_whole:  # the log says why
        raise typer.Exit(1)


def _check_drafts(drafts: Drafts | None, policy: "Policy") -> None:
    """Refuse to draft for every answer where none can be drafted.

    Raises:
        BudgetError: No answer can be drafted at such a budget.
        PolicyError: The policy plans no drafts.
    """
    from buddy.engine.tokenwise import why_no_drafts
    from buddy.serving.http.draft_rules import check_default

    if not drafts:
        return
    if (reason := why_no_drafts(policy)) is not None:
        raise PolicyError(f"--drafts: {reason}")
    try:
        check_default(drafts, policy.num_blocks, least_blocks(policy.num_blocks, policy.num_pinned))
    except BudgetError as error:
        raise BudgetError(f"--drafts: {error}") from error


def _start(
    model: Any,
    tokenizer: Any,
    name: str,
    capacity: CapacityOptions,
    rules: "BudgetRules",
    batch_route: "BatchRoute",
) -> "EngineClient":
    """The engine behind the server, running."""
    from buddy.serving.control.admission import AdmissionConfig
    from buddy.serving.control.controller import ControlConfig
    from buddy.serving.start import start_engine

    control = ControlConfig(
        num_blocks=model.num_blocks,
        min_blocks=rules.floor,
        max_rows=capacity.max_rows,
        itl_ms=capacity.slo_itl_ms,
    )
    admission = AdmissionConfig(max_queue=capacity.max_queue, ttft_ms=capacity.slo_ttft_ms)
    return start_engine(model, tokenizer, name, control, admission, batch_route=batch_route)


def _limits(capacity: CapacityOptions, key_file: Path | None) -> dict[str, str]:
    """What the server takes and promises, in words."""

    def target(ms: float | None) -> str:
        return "no promise" if ms is None else f"{ms:g} ms"

    return {
        "rows at once": str(capacity.max_rows),
        "queue": str(capacity.max_queue),
        "time to first token": target(capacity.slo_ttft_ms),
        "time between tokens": target(capacity.slo_itl_ms),
        "keys": "none: this machine alone" if key_file is None else str(key_file),
    }


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
