"""One step of stage 1: a batch under drawn budgets, its gradients, and the optimiser's step.

Source: paper, section 4.2; the relaxations beyond softmax, the policy gradient and the second
route are ours.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import RecipeError, TrainingError
from buddy.model import BuddyForCausalLM
from buddy.training.batches import Batch, BatchOrder, collate, micro_batches
from buddy.training.fast import fast_passes
from buddy.training.losses import Teaching, group_advantages, mean_by_row, weighted_losses
from buddy.training.router.averaging import WeightMean
from buddy.training.router.budgets import Draws, budget_range, draw_step
from buddy.training.router.choosing import training_choice
from buddy.training.router.measured import measured_loss
from buddy.training.router.objective import Spots, find_spots
from buddy.training.router.recipe import Recipe
from buddy.training.router.sharding import ShardedBlocks
from buddy.training.router.straight_through import straight_through_pass
from buddy.training.router.teacher import load_teacher, teacher_pass
from buddy.training.router.token_depths import token_depths
from buddy.training.schedule import learning_rate_share


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, over all processes.

    Attributes:
        step: Steps done, this one included.
        loss: Mean loss of the answers, in nats, without what is beside it in the objective.
        by_budget: Mean loss and number of rows of each budget in blocks.
        plans: Executed blocks of each row.
        router_grad_norm: Before clipping; None where no router learns.
        num_tokens: Tokens of prompts and answers.
        seconds: Wall-clock time.
    """

    step: int
    loss: float
    by_budget: dict[int, tuple[float, int]]
    plans: list[tuple[int, ...]]
    router_grad_norm: float | None
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Share:
    """What one process computes at once of a step's batch, a row for each plan of each example.

    Attributes:
        rows: The example of each row, by its place in the batch.
        places: Of each row, among the rows of all processes.
        examples: Of each row.
        samples: Rows of one example.
        batch: The rows side by side.
        weights: Of each row's mean loss, in the loss of the whole batch.
    """

    rows: list[int]
    places: list[int]
    examples: list[Example]
    samples: int
    batch: Batch
    weights: Float[Tensor, " rows"]


RowReport = tuple[float, int, tuple[int, ...], float]
"""A row's loss, its budget in blocks, its plan, and its weight in the batch's loss."""


class JointTrainer:
    """Takes steps; every step depends on the recipe, the weights and its number alone.

    Args:
        model: With adapters and, for `routed`, a router; on the device of this process.
        recipe: What to do.
        examples: Training rows.
        process: This process and how many there are.
        reduce: Sums a tensor over all processes.
        gather: Lists what every process has, in the order of processes.
        sharded: The model's blocks, where the processes hold shares of them.
    """

    def __init__(
        self,
        model: BuddyForCausalLM,
        recipe: Recipe,
        examples: Sequence[Example],
        *,
        process: tuple[int, int] = (0, 1),
        reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        gather: Callable[[list[Any]], list[Any]] = lambda items: items,
        sharded: ShardedBlocks | None = None,
    ) -> None:
        self.model, self.recipe, self.sharded = model, recipe, sharded
        optim = recipe.optim
        self.order = BatchOrder(examples, optim.batch_size, optim.seed)
        if optim.batch_size < process[1]:
            raise RecipeError(
                f"batch_size {optim.batch_size} is below the number of processes, {process[1]}"
            )
        self.steps = optim.steps or max(1, round(optim.epochs * self.order.per_epoch))
        if recipe.budget.curriculum_steps > self.steps:
            raise RecipeError(
                f"budget.curriculum_steps must be at most {self.steps:,}, the steps of the run, "
                f"got {recipe.budget.curriculum_steps:,}"
            )
        if optim.decay_steps > self.steps:
            raise RecipeError(
                f"optim.decay_steps must be at most {self.steps:,}, the steps of the run, got "
                f"{optim.decay_steps:,}"
            )
        self.budgets = budget_range(recipe.budget, model.num_blocks)
        self._process, self._reduce, self._gather = process, reduce, gather
        self.teacher = load_teacher(recipe, model)
        adapters, router = trained_parameters(model)
        self.parameters = {**adapters, **router}
        router_rate = self.router_rate()
        self._groups = [
            {"params": list(group.values()), "lr": rate, "peak": rate}
            for group, rate in ((adapters, optim.learning_rate), (router, router_rate))
            if group
        ]
        self.optimizer = torch.optim.AdamW(self._groups, weight_decay=optim.weight_decay)
        self._router_learns = bool(router) and router_rate > 0
        for parameter in router.values():
            parameter.requires_grad_(self._router_learns)  # else blocks need no gates
        self.mean = WeightMean(self.parameters, optim.average) if optim.average > 0 else None

    def router_rate(self) -> float:
        """Peak learning rate of what is no adapter."""
        optim = self.recipe.optim
        own = optim.router_learning_rate
        return optim.learning_rate if own is None else own

    @property
    def num_processes(self) -> int:
        """That share each batch."""
        return self._process[1]

    def step(self, step: int) -> StepReport:
        """Take one step, counted from 0.

        Raises:
            TrainingError: The loss or a gradient is NaN or infinite; nothing was changed.
        """
        started_s = time.perf_counter()
        seed = self.recipe.optim.seed * 1_000_003 + step
        torch.manual_seed(seed * self._process[1] + self._process[0])  # of dropout alone
        examples = self.order[step]
        for place, group in enumerate(self.optimizer.param_groups):
            group["lr"] = group["peak"] * self.rate_share(step, place)
        rows = self._backward(examples, seed, step)
        for group in self.optimizer.param_groups:
            if group["lr"] == 0:  # it rests, and AdamW would remember these gradients
                for parameter in group["params"]:
                    parameter.grad = None
        norms = self._clip()
        if not all(map(math.isfinite, [*(loss for loss, *_ in rows), *norms])):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the loss of step {step + 1} is NaN or infinite, so training has stopped; the "
                "last training state and checkpoint are intact: lower the learning rate or look "
                "at the rows of this step, then go on with --resume"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.mean is not None:
            self.mean.add(step)
        by_budget: dict[int, tuple[float, int]] = {}
        for loss, blocks, *_ in rows:
            mean, count = by_budget.get(blocks, (0.0, 0))
            by_budget[blocks] = ((mean * count + loss) / (count + 1), count + 1)
        return StepReport(
            step=step + 1,
            loss=sum(loss * weight for loss, _, _, weight in rows),
            by_budget=by_budget,
            plans=[plan for _, _, plan, _ in rows],
            router_grad_norm=norms[-1] if self._router_learns else None,
            num_tokens=sum(example.num_tokens for example in examples),
            seconds=time.perf_counter() - started_s,
        )

    def rate_share(self, step: int, place: int) -> float:
        """Share of its peak learning rate that the group at a place has; adapters come first."""
        return learning_rate_share(self.recipe.optim, step, self.steps)

    def _backward(self, examples: list[Example], seed: int, step: int) -> list[RowReport]:
        """Gradients of this process's rows, summed over all; what each row of all gave."""
        shares = list(self._shares(examples))
        most = len(shares) if self.sharded is None else max(self._gather([len(shares)]))
        rows = [row for share in shares for row in self._backward_of(share, examples, seed, step)]
        for _ in range(len(shares), most):
            assert self.sharded is not None
            self.sharded.accompany()
        self._sum_gradients()
        return self._gather(rows)

    def _backward_of(
        self, share: Share, examples: list[Example], seed: int, step: int
    ) -> list[RowReport]:
        """Add the gradients of some rows of the batch; what each of them gave.

        Whatever the rows of a batch share is taken from all its `examples`: weights, counts of
        tokens, draws. The advantage of a sampled plan is among plans of one example, and those are
        in one share.
        """
        recipe, model, samples = self.recipe, self.model, share.samples
        draws = draw_step(recipe, self.budgets, len(examples), seed, step)
        batch, places, weights = share.batch, share.places, share.weights
        budgets = torch.tensor([draws.budgets[place] for place in places], device=model.device)
        depths = token_depths(
            recipe.budget, batch, budgets, draws.choices, model.num_blocks, places, seed
        )
        spots = find_spots(
            batch,
            weights,
            [example for example in examples for _ in range(samples)],
            prompt_loss=recipe.optim.prompt_loss,
            teacher=recipe.teacher,
            places=places,
            seed=seed,
        )
        teaching = self._teaching(share, spots)
        with self._passes():
            out = straight_through_pass(
                model.backbone,
                model.scoring_policy,
                batch,
                depths,
                training_choice(recipe.router, model.scoring_policy, places=places, seed=seed),
                is_dense=draws.is_dense,
                second_from=self._second_from(share, draws),
                sharded=self.sharded,
            )
            weighted, losses = weighted_losses(
                model.backbone,
                out.hidden[spots.rows, spots.columns],
                spots.targets,
                spots.data,
                teaching,
            )
            answer = spots.is_answer
            by_row = mean_by_row(losses[answer], spots.rows[answer], len(share.rows))
            loss = weighted.sum()
            if out.log_prob is not None:
                loss = loss + recipe.router.coefficient * policy_gradient_loss(
                    by_row, out.log_prob, samples, len(examples)
                )
            if recipe.router.method == "measured" and self._router_learns:
                loss = loss + recipe.router.coefficient * measured_loss(
                    model, batch, budgets, weights, recipe.router, places=places, seed=seed
                )
            loss.backward()  # type: ignore[no-untyped-call]
        return row_reports(by_row, budgets, out.plan.executed_sets, weights)

    def _passes(self) -> AbstractContextManager[None]:
        """Compute a pass and its backward pass as the recipe says, within the context."""
        checkpointing = self.recipe.optim.activation_checkpointing
        return fast_passes(self.model.backbone, checkpointing=checkpointing)

    def _shares(self, examples: Sequence[Example]) -> Iterator[Share]:
        """The rows of this process in parts, each row as often as plans are sampled for it."""
        (first, every), samples = self._process, self.recipe.plans
        most = self.recipe.optim.micro_batch_tokens // samples
        weights = self._weights(examples)
        for part in micro_batches(examples, range(first, len(examples), every), most):
            rows = [row for row in part for _ in range(samples)]
            yield Share(
                rows=rows,
                places=[row * samples + number % samples for number, row in enumerate(rows)],
                examples=[examples[row] for row in rows],
                samples=samples,
                batch=collate([examples[row] for row in rows], self.model.device),
                weights=torch.tensor(
                    [weights[row] / samples for row in rows], device=self.model.device
                ),
            )

    def _weights(self, examples: Sequence[Example]) -> list[float]:
        """The weight of each example's mean loss in the loss of the whole batch."""
        if self.recipe.optim.loss == "example":
            return [1 / len(examples)] * len(examples)
        total = sum(len(example.answer) for example in examples)
        return [len(example.answer) / total for example in examples]

    def _teaching(self, share: Share, spots: Spots) -> Teaching | None:
        """What the teacher says at the first of the spots; a row is run once for all its plans."""
        if self.teacher is None:
            return None
        once = collate(share.examples[:: share.samples], self.model.device)
        taught = slice(len(spots.teacher))
        hidden = teacher_pass(self.teacher, once)
        hidden = hidden[spots.rows[taught] // share.samples, spots.columns[taught]]
        return Teaching(hidden, spots.teacher, self.teacher.backbone)

    def _second_from(self, share: Share, draws: Draws) -> Int[Tensor, " batch"] | None:
        """The column from which each row follows a second route; the width where it has none."""
        wanted = self.recipe.router.second_route
        if wanted == 0:
            return None
        width = share.batch.token_ids.shape[1]
        columns = []
        for row, example in zip(share.rows, share.examples, strict=True):
            chance, place = draws.second_routes[row]
            # One of the answer's tokens but the last, which predicts nothing.
            after = len(example.prompt) + int(place * (len(example.answer) - 1))
            columns.append(after if chance < wanted and len(example.answer) > 1 else width)
        return torch.tensor(columns, device=share.batch.token_ids.device)

    def _sum_gradients(self) -> None:
        if self._process[1] == 1:
            return
        parameters = list(self.parameters.values())
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # What no row of any process reaches has no gradient, as in one process: AdamW passes it by.
        reached = own[0].new_tensor([p.grad is not None for p in parameters])
        whole = self._reduce(torch.cat([*(part.flatten() for part in own), reached]))
        *parts, reached = torch.split(whole, [*map(torch.numel, parameters), len(parameters)])
        for parameter, part, times in zip(parameters, parts, reached.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).clone() if times > 0 else None

    def _clip(self) -> list[float]:
        """Clip adapters and router apart, as the router's are far smaller; the norms before."""
        limit = self.recipe.optim.max_grad_norm
        return [
            float(torch.nn.utils.clip_grad_norm_(group["params"], limit))
            for group in self.optimizer.param_groups
        ]


def row_reports(
    losses: Float[Tensor, " rows"],
    depths: Iterable[int | Tensor],
    plans: Iterable[tuple[int, ...]],
    weights: Iterable[float | Tensor],
) -> list[RowReport]:
    """What each row gave, as plain numbers."""
    return [
        (float(loss), int(depth), plan, float(weight))
        for loss, depth, plan, weight in zip(losses.detach(), depths, plans, weights, strict=True)
    ]


def policy_gradient_loss(
    by_row: Float[Tensor, " rows"],
    log_prob: Float[Tensor, " rows"],
    samples: int,
    num_examples: int,
) -> Float[Tensor, ""]:
    """Minus the advantage times the plan's log-probability, averaged over examples and samples.

    The advantage is that of stage 2: minus the loss, normalised among the plans of one example.
    """
    advantage = group_advantages(-by_row.detach().view(-1, samples))
    return -(advantage.flatten() * log_prob).sum() / (num_examples * samples)


def trained_parameters(
    model: BuddyForCausalLM,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The adapters' parameters, and those of the router or of a method's part, by name."""
    parts = {"router": model.router, "learned": model.learned}
    scales = model.depth_scales
    return (
        {
            **{name: p for name, p in model.model.named_parameters() if p.requires_grad},
            **({} if scales is None else {"depth_scales.weight": scales.weight}),
        },
        {
            f"{part}.{name}": p
            for part, module in parts.items()
            if module is not None
            for name, p in module.named_parameters()
            if p.requires_grad
        },
    )
