"""A router for frozen weights, from its recipe to a checkpoint and a table; resumable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch

from buddy.data.examples import Example, by_source
from buddy.depth.prior import Prior
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.errors import DataError
from buddy.files import plain_name
from buddy.model import BuddyForCausalLM
from buddy.routing.ledger import Ledger
from buddy.routing.router import Router
from buddy.training.answer_losses import Losses
from buddy.training.batches import check_context, draw_rows, rows_identity
from buddy.training.card import routed_card
from buddy.training.fast import fast_passes
from buddy.training.route.check import check_router, order_sets
from buddy.training.route.fit import fit_router, new_router, seen_prompts, seen_summaries
from buddy.training.route.groups import (
    COMMON,
    GROUPS,
    Clusters,
    Group,
    apart,
    are_named,
    check_found,
    check_groups,
    split_groups,
)
from buddy.training.route.ledger import add_ledger
from buddy.training.route.losses import race_batches
from buddy.training.route.measurements import SetMeasurements
from buddy.training.route.orders import search_order
from buddy.training.route.recipe import RouteRecipe
from buddy.training.route.start import (
    KIND,
    Described,
    check_out,
    check_untrained,
    depths_in_blocks,
    prior_order,
)
from buddy.training.run import Rows, Run, RunListener
from buddy.training.workers import Workers

_CLUSTERED: Final = 3000
"""Rows that are grouped by what the router sees, at most."""
ORDERS: Final = "orders"
"""Folder of the orders' records, within that of the run."""


def train_route(
    recipe: RouteRecipe,
    out: Path,
    *,
    resume: bool = False,
    listener: RunListener | None = None,
    described: Described | None = None,
) -> Path:
    """Search orders, confirm them, fit the router and check it.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/`, `orders/`, what is measured, and the record.
        resume: Without effect: orders and measurements always go on.
        listener: Told how it goes.
        described: The model that the recipe names, if it was looked up already.

    Returns:
        The new checkpoint's folder: the model that was named, and the router.

    Raises:
        RecipeError: A setting does not fit the model.
        ModelError: The model cannot be loaded, or its losses are not numbers.
        DataError: A data file is missing, empty or malformed, or a group has too few prompts.
        TrainingError: The folder cannot be had, or holds another run.
        ResultError: What an earlier run left is damaged or of another run, or cannot be written.
    """
    notes = check_out(out, recipe)
    named = None if described is None else described.resolved
    run = Run(recipe, out, resume=resume, listener=listener, named=named)
    described = described or Described.of(run.named)
    outline = described.outline
    check_context(recipe.data.max_tokens, outline)
    check_untrained(recipe, outline)
    depths = depths_in_blocks(recipe.search, outline.num_blocks)
    rows = run.read_rows(tokenizer=described.tokenizer)
    run.warn(rows.left_out)
    train, validation = apart(rows.train, rows.validation)
    if not train:
        raise DataError("every prompt of data.train is in data.validation: name other rows")
    kinds = by_source(train)
    if are_named(kinds, recipe.search):
        check_groups(kinds)
    model = run.load_model(policy="full", merge_adapter=True)
    run.warn([*notes, *notes_on_dtype(model.backbone)])
    with run.claimed():
        route = _Route(
            run,
            model,
            depths,
            SetMeasurements(run, model, Workers(model.device), recipe.search.batch_size),
        )
        return route.go(replace(rows, train=train, validation=validation))


@dataclass(frozen=True, slots=True)
class _Confirmed:
    """What other rows say of the orders.

    Attributes:
        common: The order that loses least on the rows of all groups: of all prompts, or of one.
        groups: The order that loses least on each group's rows, what it gains over the common
            one, and whether the group keeps it.
    """

    common: str
    groups: dict[str, dict[str, Any]]


@dataclass(slots=True)
class _Route:
    """A run on its way."""

    run: Run[RouteRecipe]
    model: BuddyForCausalLM
    depths: tuple[int, ...]
    measurements: SetMeasurements

    def go(self, rows: Rows) -> Path:
        recipe, model = self.run.recipe, self.model
        with fast_passes(model.backbone):
            prior = prior_order(model, self._ordering)
            probe = new_router(model, prior, recipe.fit, recipe.seed)
            groups, strangers = self._groups(rows, probe)
            searched = self._search(groups, prior)
            confirmed = self._confirm(groups, searched)
            own = {
                name: found["order"] if found["is_kept"] else confirmed.common
                for name, found in confirmed.groups.items()
            }
            orders, common = {n: searched[own[n]] for n in groups}, searched[confirmed.common]
            if set(orders.values()) == {common}:
                self.run.warn(
                    ["no kind of prompt keeps an order of its own: all have the common one"]
                )
            router = new_router(model, common, recipe.fit, recipe.seed)
            ranked = fit_router(
                router,
                {name: seen_summaries(model, router, group.fit) for name, group in groups.items()},
                orders,
                recipe.fit,
                recipe.seed,
                partial(self.run.listener.measured, "fitting the router"),
            )
            tables = check_router(
                self.measurements, router, self.depths, groups, strangers, searched, own, prior
            )
        ledger, spent = add_ledger(
            self.measurements,
            self._routed(self.model, router, confirmed.common),
            groups,
            common,
            self.depths,
            self._rounds,
        )
        return self._finish(
            rows,
            confirmed,
            router,
            ledger,
            {
                "orders": {name: list(order) for name, order in searched.items()},
                "common": confirmed.common,
                "confirmed": confirmed.groups,
                "rows": {
                    name: {part: len(getattr(group, part)) for part in Group.__slots__}
                    for name, group in groups.items()
                },
                "pairs_ranked": ranked,
                "tables": {name: [c.to_json() for c in table] for name, table in tables.items()},
                "ledger": spent,
            },
        )

    @property
    def _rounds(self) -> int:
        """Blocks that orders are searched for."""
        blocks, least = self.model.num_blocks, self.run.recipe.search.least
        return min(blocks - 2, blocks - min(*self.depths, round(least * blocks)))

    def _ordering(self, stage: str, done: int, total: int | None) -> None:
        self.run.listener.measured("measuring a quick order", done, total or 0)

    def _groups(
        self, rows: Rows, router: Router
    ) -> tuple[dict[str, Group], dict[str, Sequence[Example]]]:
        """Groups of training rows, and rows for the check that belong to none."""
        settings, seed = self.run.recipe.search, self.run.recipe.seed
        train, validation = by_source(rows.train), by_source(rows.validation)
        if not are_named(train, settings):
            see = partial(seen_prompts, self.model, router)
            some = draw_rows(rows.train, _CLUSTERED, seed)
            seen = see(some)
            clusters = Clusters.of(seen, settings.groups or GROUPS, seed)
            check_found(len(clusters.centres), settings, prompts=len(some))
            train = clusters.parted(some, seen)
            validation = (
                clusters.parted(rows.validation, see(rows.validation)) if rows.validation else {}
            )
        prompts_each = self.run.recipe.fit.prompts
        groups = split_groups(train, validation, settings, prompts=prompts_each, seed=seed)
        strangers: dict[str, Sequence[Example]] = {
            name: draw_rows(list(some), settings.check_rows, seed)
            for name, some in validation.items()
            if name not in groups and len(some) > 1
        }
        return groups, strangers

    def _search(
        self, groups: Mapping[str, Group], prior: Sequence[int]
    ) -> dict[str, tuple[int, ...]]:
        """The common order and that of each group; below what is searched the others follow.

        The common order is to beat the prior, and a group's the common one.
        """
        settings, blocks, rounds = self.run.recipe.search, self.model.num_blocks, self._rounds
        each = -(-max(settings.rows, 8 * len(groups)) // len(groups))
        mixed = [row for group in groups.values() for row in group.search[:each]]
        tasks: dict[str, Sequence[Example]] = {COMMON: mixed}
        if len(groups) > 1:
            tasks |= {name: group.search for name, group in groups.items()}
        folder, facts = self.run.out / ORDERS, self.model.facts()
        folder.mkdir(exist_ok=True)
        done, total, lock = dict.fromkeys(tasks, 0), rounds * len(tasks), Lock()

        def report(name: str, removed: int) -> None:
            with lock:
                done[name] = removed
                self.run.listener.measured("searching orders", sum(done.values()), total)

        def search(name: str, lead: Sequence[int], until: int) -> tuple[int, ...]:
            searched = search_order(
                self.measurements.measure,
                race_batches(tasks[name], settings.batch_size),
                folder / f"{plain_name(name)}.json",
                num_blocks=blocks,
                rounds=rounds,
                candidates=settings.candidates,
                leave=settings.leave,
                identity={
                    "group": name,
                    "rows": rows_identity(tasks[name]),
                    "common_rows": rows_identity(mixed),
                    "prior": list(prior),
                    "dtype": str(self.model.dtype),
                    "batch_size": settings.batch_size,
                },
                model=facts,
                lead=lead,
                until=until,
                on_round=partial(report, name),
            )
            return tuple(searched.removed)

        def begin(name: str) -> tuple[int, ...]:  # a group's first round tries every block anyway
            return search(name, prior, rounds) if name == COMMON else search(name, (), 1)

        begun = dict(zip(tasks, self.measurements.workers.map(begin, tasks), strict=True))
        lead = begun[COMMON]
        ended = self.measurements.workers.map(
            lambda name: lead if name == COMMON else search(name, lead, rounds), tasks
        )
        found = dict(zip(tasks, ended, strict=True))
        common = [*found[COMMON], *(b for b in prior if b not in found[COMMON])]
        return {
            name: (*order, *(block for block in common if block not in order))
            for name, order in found.items()
        }

    def _confirm(
        self, groups: Mapping[str, Group], searched: Mapping[str, Sequence[int]]
    ) -> _Confirmed:
        """The common order, and each group's best, on rows that nothing was searched on."""
        examples = [row for group in groups.values() for row in group.confirm]
        _, sets = order_sets(searched, self.depths, self.model.num_blocks)
        every = sets.expand(len(examples), -1, -1)
        lost = self.measurements.losses("confirming orders", examples, every)
        by_order = lost.nats.view(len(examples), len(searched), -1).mean(2)
        parts, start = dict[str, Losses](), 0
        for name, group in groups.items():
            mine = slice(start, start := start + len(group.confirm))
            parts[name] = Losses(by_order[mine], lost.tokens[mine])
        means = torch.stack([part.mean for part in parts.values()]).mean(0)
        names = list(searched)
        common = int(means.argmin())
        confirmed, sure = {}, self.run.recipe.search.sure
        for name, part in parts.items():
            best = int(part.mean.argmin())
            gain, error = Losses(part.nats[:, [common]], part.tokens).behind(part.nats[:, best])
            confirmed[name] = {
                "order": names[best],
                "gain": float(gain),
                "error": float(error),
                "is_kept": bool(part.is_sure(gain, error, sure)),
            }
        return _Confirmed(names[common], confirmed)

    def _routed(
        self, model: BuddyForCausalLM, router: Router, common: str, **options: Any
    ) -> BuddyForCausalLM:
        """A model under the router."""
        return BuddyForCausalLM(
            model.model,
            policy="routed",
            kv_policy=model.kv_policy,
            router=router,
            prior=Prior(router.decision.prior.clone(), f"order searched on {common}"),
            **options,
        )

    def _finish(
        self,
        rows: Rows,
        confirmed: _Confirmed,
        router: Router,
        ledger: Ledger | None,
        results: dict[str, Any],
    ) -> Path:
        recipe, saved = self.run.recipe, self.run.load_as_saved()
        apart = [name for name, found in confirmed.groups.items() if found["is_kept"]]
        routed = self._routed(
            saved,
            router.cpu(),
            confirmed.common,
            origin=saved.origin,
            card=routed_card(
                recipe.model.name, recipe.data.train, apart, has_ledger=ledger is not None
            ),
            ledger=ledger,
        )
        return self.run.finish(
            routed,
            kind=KIND,
            rows=rows,
            config={"num_blocks": self.model.num_blocks, "depths": list(self.depths)},
            results=results,
        )
