"""A router for frozen weights, from its recipe to a checkpoint and a table; resumable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import pad

from buddy.budget.blocks import least_blocks
from buddy.data.examples import Example
from buddy.depth.prior import Prior
from buddy.depth.select import select_blocks
from buddy.engine.dtype_warning import notes_on_dtype
from buddy.errors import RecipeError
from buddy.files import plain_name
from buddy.model import BuddyForCausalLM
from buddy.policies.static import StaticPolicy
from buddy.resume import ResumeFile, fingerprint
from buddy.routing.router import Router
from buddy.training.batches import check_context, draw_rows, rows_identity
from buddy.training.card import routed_card
from buddy.training.fast import fast_passes
from buddy.training.route.check import FULL, PRIOR, ROUTED, Compared, compare, order_sets
from buddy.training.route.fit import fit_router, new_router, seen_summaries
from buddy.training.route.groups import (
    GROUPS,
    Clusters,
    Group,
    by_source,
    split_groups,
)
from buddy.training.route.losses import Losses, batches, race_batches, set_losses
from buddy.training.route.orders import search_order
from buddy.training.route.recipe import RouteRecipe
from buddy.training.route.workers import Workers, side_by_side
from buddy.training.run import Rows, Run, RunListener
from buddy.training.summaries import router_summaries

COMMON: Final = "all prompts"
"""Name of the order that is searched on rows of every group."""
_BATCH: Final = 16
_CLUSTERED: Final = 3000
"""Rows that are grouped by what the router sees, at most."""
ORDERS: Final = "orders"
"""Folder of the orders' records, within that of the run."""


def train_route(
    recipe: RouteRecipe, out: Path, *, resume: bool = False, listener: RunListener | None = None
) -> Path:
    """Search orders, confirm them, fit the router and check it.

    Args:
        recipe: Everything that fixes the run.
        out: Folder for `checkpoint/`, `orders/`, what is measured, and the record.
        resume: Of no effect: orders and measurements always go on.
        listener: Told how it goes.

    Returns:
        The new checkpoint's folder: the model that was named, and the router.

    Raises:
        RecipeError: A setting does not fit the model.
        ModelError: The model cannot be loaded, or its losses are not numbers.
        DataError: A data file is missing, empty or malformed, or a group has too few rows.
        TrainingError: The folder cannot be had, or holds another run.
        ResultError: What an earlier run left is damaged or of another run, or cannot be written.
    """
    run = Run(recipe, out, resume=resume, listener=listener)
    outline = BuddyForCausalLM.outline(run.named, policy="full")
    check_context(recipe.data.max_tokens, outline)
    depths = _depths(recipe, outline)
    rows = run.read_rows()
    run.warn(rows.left_out)
    model = run.load_model(policy="full", merge_adapter=True)
    run.warn(notes_on_dtype(model.backbone))
    with run.claimed(), fast_passes(model.backbone), side_by_side(model.device) as workers:
        return _Route(run, model, depths, workers).go(rows)


def _depths(recipe: RouteRecipe, outline: BuddyForCausalLM) -> tuple[int, ...]:
    """The depths in blocks, deepest first."""
    num_blocks = outline.num_blocks
    least = least_blocks(num_blocks)
    depths = tuple(dict.fromkeys(round(share * num_blocks) for share in recipe.search.depths))
    if not all(least <= blocks < num_blocks for blocks in depths):
        raise RecipeError(
            f"search.depths: of {num_blocks} blocks they are {list(depths)}, expected {least} to "
            f"{num_blocks - 1}"
        )
    return depths


def _prior_order(model: BuddyForCausalLM) -> tuple[int, ...]:
    """The removal order that the model has without a router."""
    prior = model.prior
    if prior is None:
        raise RecipeError("model.name: this model has no prior: name a base model")
    return StaticPolicy(Prior(prior), model.num_blocks).removal_order


@dataclass(slots=True)
class _Route:
    """A run on its way."""

    run: Run[RouteRecipe]
    model: BuddyForCausalLM
    depths: tuple[int, ...]
    workers: Workers

    def go(self, rows: Rows) -> Path:
        recipe, model = self.run.recipe, self.model
        prior = _prior_order(model)
        probe = new_router(model, prior, recipe.fit, recipe.seed)
        groups, strangers = self._groups(rows, probe)
        searched = self._search(groups, prior)
        common = searched.pop(COMMON)
        confirmed = self._confirm(groups, common, searched)
        orders = {
            name: order if confirmed[name]["is_kept"] else common
            for name, order in searched.items()
        }
        router = new_router(model, common, recipe.fit, recipe.seed)
        ranked = fit_router(
            router,
            {name: seen_summaries(model, router, group.fit) for name, group in groups.items()},
            orders,
            recipe.fit,
            recipe.seed,
        )
        every = {COMMON: common, **searched}
        tables = self._check(groups, strangers, every, prior, router)
        return self._finish(rows, groups, every, confirmed, router, ranked, tables)

    def _groups(
        self, rows: Rows, router: Router
    ) -> tuple[dict[str, Group], dict[str, Sequence[Example]]]:
        """Groups of training rows, and rows for the check that belong to none."""
        settings, seed = self.run.recipe.search, self.run.recipe.seed
        train, validation = by_source(rows.train), by_source(rows.validation)
        if settings.groups is not None or len(train) == 1:
            see = partial(seen_summaries, self.model, router, parts=(0.0,))
            some = draw_rows(rows.train, _CLUSTERED, seed)
            clusters = Clusters.of(see(some), settings.groups or GROUPS, seed)

            def grouped(some: Sequence[Example]) -> dict[str, list[Example]]:
                made: dict[str, list[Example]] = {}
                mine = clusters(see(some)).tolist() if some else []
                for example, group in zip(some, mine, strict=True):
                    made.setdefault(f"group {group + 1}", []).append(example)
                return made

            train, validation = grouped(some), grouped(rows.validation)
        prompts_each = self.run.recipe.fit.prompts
        groups = split_groups(train, validation, settings, prompts=prompts_each, seed=seed)
        strangers: dict[str, Sequence[Example]] = {
            name: some[: settings.check_rows]
            for name, some in validation.items()
            if name not in groups
        }
        return groups, strangers

    def _search(
        self, groups: Mapping[str, Group], prior: Sequence[int]
    ) -> dict[str, tuple[int, ...]]:
        """The common order and that of each group; below what is searched the others follow."""
        settings, blocks = self.run.recipe.search, self.model.num_blocks
        rounds = min(blocks - 2, blocks - min(*self.depths, round(settings.least * blocks)))
        each = max(1, -(-max(settings.rows, 8 * len(groups)) // len(groups)))
        mixed = [row for group in groups.values() for row in group.search[:each]]
        tasks = {COMMON: mixed, **{name: group.search for name, group in groups.items()}}
        folder, facts = self.run.out / ORDERS, self.model.facts()
        folder.mkdir(exist_ok=True)
        done, total, lock = dict.fromkeys(tasks, 0), rounds * len(tasks), Lock()

        def told(name: str, removed: int) -> None:
            with lock:
                done[name] = removed
                self.run.listener.measured("searching orders", sum(done.values()), total)

        def search(task: tuple[str, Sequence[Example]]) -> tuple[int, ...]:
            name, rows = task
            return tuple(
                search_order(
                    self._measure,
                    race_batches(rows, settings.batch_size),
                    folder / f"{plain_name(name)}.json",
                    num_blocks=blocks,
                    rounds=rounds,
                    candidates=settings.candidates,
                    sure=settings.sure,
                    identity={
                        "group": name,
                        "rows": rows_identity(rows),
                        "dtype": str(self.model.dtype),
                        "batch_size": settings.batch_size,
                    },
                    model=facts,
                    on_round=partial(told, name),
                ).removed
            )

        found = dict(zip(tasks, self.workers.map(search, tasks.items()), strict=True))
        common = [*found[COMMON], *(b for b in prior if b not in found[COMMON])]
        return {
            name: (*order, *(block for block in common if block not in order))
            for name, order in found.items()
        }

    def _measure(self, rows: Sequence[Example], sets: Bool[Tensor, "#rows sets blocks"]) -> Losses:
        self.workers.check()
        return set_losses(self.model.backbone, rows, sets)

    def _confirm(
        self,
        groups: Mapping[str, Group],
        common: Sequence[int],
        searched: Mapping[str, Sequence[int]],
    ) -> dict[str, dict[str, Any]]:
        """Whether each group's order gains on rows that it was not searched on."""
        examples = [row for group in groups.values() for row in group.confirm]
        owner = [name for name, group in groups.items() for _ in group.confirm]
        pairs = {
            name: order_sets({COMMON: common, name: searched[name]}, self.depths, len(common) + 2)
            for name in groups
        }
        lost = self._losses(
            "confirming orders", examples, torch.stack([pairs[name][1] for name in owner])
        )
        confirmed = {}
        for name in groups:
            mine = torch.tensor([other == name for other in owner])
            by_way = lost.nats[mine].view(-1, 2, len(self.depths)).mean(2)
            part = Losses(by_way[:, :1], lost.tokens[mine])
            gain, error = part.behind(by_way[:, 1])
            is_kept = bool(gain > self.run.recipe.search.sure * error) and bool(gain > 0)
            confirmed[name] = {"gain": float(gain), "error": float(error), "is_kept": is_kept}
        return confirmed

    def _losses(
        self, what: str, examples: Sequence[Example], sets: Bool[Tensor, "rows sets blocks"]
    ) -> Losses:
        """What answers lose, each under sets of its own; batch by batch, from a file where done."""
        size = self.run.recipe.search.batch_size
        nats = torch.full(sets.shape[:2], torch.nan, dtype=torch.float64)
        tokens = torch.zeros(len(examples), dtype=torch.float64)
        file = ResumeFile(
            self.run.out / f"{what.replace(' ', '-')}.safetensors",
            {
                "rows": rows_identity(examples),
                "sets": fingerprint(sets),
                "size": size,
                "model": self.model.facts(),
                "dtype": str(self.model.dtype),
            },
        )
        kept = file.read({"nats": nats, "tokens": tokens})
        if kept is not None:
            nats, tokens = kept.tensors["nats"], kept.tensors["tokens"]
        lock, listener = Lock(), self.run.listener

        def measure(batch: tuple[list[int], list[Example]]) -> None:
            places, part = batch
            lost = self._measure(part, sets[places])
            with lock:
                nats[places], tokens[places] = lost.nats, lost.tokens
                file.write_if_due(lambda: {"nats": nats, "tokens": tokens})
                listener.measured(what, int(tokens.count_nonzero()), len(examples))

        left = [b for b in batches(examples, size) if not bool(tokens[b[0]].all())]
        listener.measured(what, int(tokens.count_nonzero()), len(examples))
        self.workers.map(measure, left)
        file.write({"nats": nats, "tokens": tokens})
        return Losses(nats, tokens)

    def _check(
        self,
        groups: Mapping[str, Group],
        strangers: Mapping[str, Sequence[Example]],
        orders: Mapping[str, Sequence[int]],
        prior: Sequence[int],
        router: Router,
    ) -> dict[str, list[Compared]]:
        """The table of the groups, and that of rows that belong to none."""
        parts = {**{name: group.check for name, group in groups.items()}, **strangers}
        parts = {name: rows for name, rows in parts.items() if rows}
        examples = [row for rows in parts.values() for row in rows]
        blocks = self.model.num_blocks
        columns, fixed = order_sets({PRIOR: prior, **orders}, self.depths, blocks)
        routed = torch.stack(
            [self._routed_sets(router, examples, depth) for depth in self.depths], 1
        )
        whole = torch.ones(len(examples), 1, blocks, dtype=torch.bool)
        sets = torch.cat([fixed.expand(len(examples), -1, -1), routed, whole], 1)
        columns += [*((ROUTED, depth) for depth in self.depths), (FULL, blocks)]
        lost = self._losses("checking the router", examples, sets)
        places, start = dict[str, range](), 0
        for name, rows in parts.items():
            places[name] = range(start, start := start + len(rows))

        def table(names: Sequence[str]) -> list[Compared]:
            by_name = {n: Losses(lost.nats[places[n]], lost.tokens[places[n]]) for n in names}
            everyone = [place for n in names for place in places[n]]
            own = {name: name for name in groups}
            return [
                compare(by_name, columns, depth, own, routed[everyone, at])
                for at, depth in enumerate(self.depths)
            ]

        tables = {"groups": table(list(filter(parts.__contains__, groups)))}
        if strangers:
            tables["others"] = table(list(strangers))
        return tables

    def _routed_sets(
        self, router: Router, examples: Sequence[Example], depth: int
    ) -> Bool[Tensor, "answers blocks"]:
        """What the router chooses for each prompt."""
        summaries = torch.cat(
            [
                router_summaries(self.model, router, examples[start : start + _BATCH])
                for start in range(0, len(examples), _BATCH)
            ]
        )
        scores = pad(router.decision.fuse(router.decision(summaries)), (1, 1))
        wanted = torch.full((len(examples),), depth)
        return select_blocks(scores, wanted).mask.cpu()

    def _finish(
        self,
        rows: Rows,
        groups: Mapping[str, Group],
        orders: Mapping[str, Sequence[int]],
        confirmed: Mapping[str, Any],
        router: Router,
        ranked: float,
        tables: Mapping[str, Sequence[Compared]],
    ) -> Path:
        recipe = self.run.recipe
        saved = self.run.load_as_saved()
        kept = [name for name in groups if confirmed[name]["is_kept"]]
        routed = BuddyForCausalLM(
            saved.model,
            policy="routed",
            kv_policy=saved.kv_policy,
            origin=saved.origin,
            card=routed_card(recipe.model.name, recipe.data.train, kept),
            router=router.cpu(),
            prior=Prior(router.decision.prior.clone(), f"order searched on {COMMON}"),
        )
        return self.run.finish(
            routed,
            kind="training-route",
            rows=rows,
            config={"num_blocks": self.model.num_blocks, "depths": list(self.depths)},
            results={
                "orders": {name: list(order) for name, order in orders.items()},
                "confirmed": confirmed,
                "rows": {
                    name: {part: len(getattr(group, part)) for part in Group.__slots__}
                    for name, group in groups.items()
                },
                "pairs_ranked": ranked,
                "tables": {
                    name: [compared.to_json() for compared in table]
                    for name, table in tables.items()
                },
            },
        )
