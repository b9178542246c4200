"""BuddyForCausalLM: a causal LM that runs under a budget, with transformers' own `generate`."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import adapter_fingerprint, base_fingerprint, part_fingerprint
from buddy.backbone.quantised import is_quantised
from buddy.budget.read import BudgetLike
from buddy.budget.source import BudgetSource
from buddy.checkpoint.card import Card
from buddy.checkpoint.load import LoadOptions, OutlineOptions, load_parts, outline_parts
from buddy.checkpoint.parts import (
    ModelParts,
    Origin,
    RoutingParts,
    base_of_adapted,
    check_names,
    describe_module,
    trained_modules,
)
from buddy.checkpoint.resolve import ModelName
from buddy.checkpoint.save import save, written_policy
from buddy.depth.plan import DepthPlan
from buddy.depth.policy import DepthPolicy, Policy, PolicyResources, check_is_policy
from buddy.depth.prior import Prior
from buddy.engine.executors.choice import EngineName, ExecutorChoice
from buddy.engine.executors.protocol import GENERAL
from buddy.engine.fork_guard import check_threads
from buddy.engine.run import check_reroute, run_once, run_step
from buddy.engine.state.cache import DEFAULT_KV_POLICY, KVPolicy, check_kv_policy
from buddy.engine.state.sequence import Reroute, SequenceState
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute, check_batch_route
from buddy.engine.step import Feed, Step, StepOutput, ask_budgets, logits_of
from buddy.engine.tabulate import Tabulator
from buddy.errors import PolicyError, PromptError
from buddy.generation.budgets import Budgets, check_predictor
from buddy.generation.generate import (
    BudgetedGeneration,
    check_columns,
    check_ids,
    check_prompts,
    check_shapes,
)
from buddy.generation.options import check_inputs, takes_old_cache_name
from buddy.generation.output import RoutedOutput
from buddy.generation.trace import DepthTrace
from buddy.hub.safe_paths import user_path
from buddy.policies.registry import build_policy
from buddy.pretrained import Pretrained

INITIAL_SLOTS = 256


class BuddyForCausalLM(nn.Module, Pretrained, BudgetedGeneration):
    """Runs exactly as many blocks as each row's budget says, chosen by a policy.

    Args:
        model: A Hugging Face causal LM of a supported family, bare or wrapped by PEFT.
        policy: `"NAME"`, `"NAME:ARGUMENT"` or a policy object. By default that of the trained
            part, else the trained router, else the prior's static order, else full depth.
        kv_policy: What a skipped block leaves in its KV cache.
        engine: Who runs decode steps: "native" (compiled code on a CPU, CUDA graphs on a GPU),
            "general" (the Hugging Face modules) or "auto", native where it can be.
        origin: Where the weights come from; needed to save a checkpoint without them.
        card: The model card that goes with a checkpoint.
        **routing: `prior`, `router`, `predictor`, `ledger` and `learned`; see
            `checkpoint.parts.RoutingParts`.

    Raises:
        FamilyError: The architecture is not supported.
        PolicyError: The policy cannot serve this model, or the predictor the router.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: str | Policy | None = None,
        kv_policy: KVPolicy = DEFAULT_KV_POLICY,
        engine: EngineName = "auto",
        origin: Origin | None = None,
        card: Card | None = None,
        **routing: Unpack[RoutingParts],
    ) -> None:
        check_threads()
        check_names(routing)
        super().__init__()
        self._policy: Policy
        self.policy_spec: str | None
        self.model = model
        self.router, self.predictor = routing.get("router"), routing.get("predictor")
        check_predictor(self.predictor, self.router)
        self.ledger, self.learned = routing.get("ledger"), routing.get("learned")
        prior = routing.get("prior")
        self._prior = Prior(prior) if isinstance(prior, Tensor) else prior
        self.kv_policy = check_kv_policy(kv_policy)
        self.origin = origin or Origin()
        self.card = card
        self.backbone = Backbone(base_of_adapted(model))
        self.config = self.backbone.config
        self.generation_config = cast(Any, model.generation_config)
        made_for = self.num_blocks if self.router is None else self.router.config.num_blocks
        if made_for != self.num_blocks:  # whether it is the policy or not
            raise PolicyError(
                f"the router is made for {made_for} blocks and the model has {self.num_blocks}: "
                "use one made for this model"
            )
        self.set_policy(self.default_policy() if policy is None else policy)
        self.executor = ExecutorChoice(self.backbone, engine)
        self._tabulate = Tabulator(self.backbone)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' number format."""
        return self.backbone.dtype

    @property
    def num_blocks(self) -> int:
        """Transformer blocks of the model."""
        return self.backbone.num_blocks

    @property
    def resources(self) -> PolicyResources:
        """What the model offers to a policy."""
        return PolicyResources(
            num_blocks=self.num_blocks,
            fingerprint=self.base_fingerprint,
            prior=self._prior,
            router=self.router,
            learned=self.learned,
            backbone=self.backbone,
        )

    @property
    def base_fingerprint(self) -> str | None:
        """Of the base model's weights, whatever adapter is on them or was folded into them."""
        if self.device.type == "meta":  # an outline has no weights; a checkpoint's says whose it is
            return self.origin.fingerprint
        if self.origin.fingerprint is not None and (
            self.origin.merged_adapter or is_quantised(self.model)
        ):
            return self.origin.fingerprint
        return base_fingerprint(self.model)

    def facts(self) -> dict[str, Any]:
        """What tells this model from others, for records: blocks, and fingerprints of its parts."""
        found = {"num_blocks": self.num_blocks, "base": self.base_fingerprint}
        adapter = self.origin.merged_adapter or adapter_fingerprint(self.model)
        if adapter is not None:
            found["adapter"] = adapter
        for name, part in trained_modules(self._routing()).items():
            found[name] = part_fingerprint(part.state_dict(), describe_module(part))
        if self._prior is not None and self._prior.fingerprint is not None:
            found["prior"] = self._prior.fingerprint
        return found

    def _routing(self) -> RoutingParts:
        """What routing knows of the blocks now; training puts new parts in."""
        return {
            "prior": self._prior,
            "router": self.router,
            "predictor": self.predictor,
            "ledger": self.ledger,
            "learned": self.learned,
        }

    @property
    def prior(self) -> Float[Tensor, " middle"] | None:
        """Normalised importance of the middle blocks; measured now, if that is still to be done."""
        return None if self._prior is None else self._prior.values()

    @property
    def prior_facts(self) -> dict[str, Any] | None:
        """For records: where the prior comes from, and its hash; None while it is not known."""
        return None if self._prior is None else self._prior.facts()

    @property
    def policy(self) -> Policy:
        """Who chooses the blocks; `set_policy` changes it."""
        return self._policy

    @property
    def scoring_policy(self) -> DepthPolicy:
        """The policy, where budgets are to be spent on scores.

        Raises:
            PolicyError: It decides while it runs, and scores no blocks.
        """
        if not isinstance(self._policy, DepthPolicy):
            raise PolicyError(
                f"policy {self._policy.name!r} decides while it runs and keeps no budget: name one "
                "that scores blocks, such as static or routed"
            )
        return self._policy

    def inference_policy(self) -> Policy:
        """The policy; without gradients, from a token table where it gives the same plans."""
        return self._tabulate(self._policy)

    def set_policy(self, policy: str | Policy) -> None:
        """Choose blocks by another policy from now on.

        Args:
            policy: `"NAME"`, `"NAME:ARGUMENT"` or an object; a checkpoint keeps names alone.

        Raises:
            PolicyError: There is no such policy, or it cannot serve this model.
        """
        made = (
            build_policy(policy, self.resources)
            if isinstance(policy, str)
            else check_is_policy(policy)
        )
        if made.num_blocks != self.num_blocks:
            raise PolicyError(
                f"the policy, or the prior or router behind it, is made for {made.num_blocks} "
                f"blocks and the model has {self.num_blocks}: use one made for this model"
            )
        self._policy, self.policy_spec = made, policy if isinstance(policy, str) else None

    def default_policy(self) -> str:
        """A method's trained part, else the router, else the prior's static order, else full."""
        if self.learned is not None:
            return self.learned.policy
        if self.router is not None:
            return "routed"
        return "full" if self._prior is None else "static"

    @classmethod
    def from_pretrained(
        cls, name: ModelName, *, engine: EngineName = "auto", **options: Unpack[LoadOptions]
    ) -> "BuddyForCausalLM":
        """Load a model by preset name, hub id, folder, GGUF file or Buddy checkpoint.

        Args:
            name: As `buddy generate --model` takes it.
            engine: As for the constructor.
            **options: `dtype`, `device`, `attention`, `policy`, `kv_policy`, `merge_adapter`,
                `quant`, `on_progress`: see `checkpoint.load.LoadOptions`.

        Raises:
            ModelError: It cannot be found, fetched or understood.
            FamilyError: Its family is not supported, or it is not computed as transformers does.
            CheckpointError: It is truncated, foreign or unsafe.
        """
        check_threads()
        return cls._assembled(load_parts(name, **options), engine)

    @classmethod
    def outline(
        cls, name: ModelName, *, engine: EngineName = "auto", **options: Unpack[OutlineOptions]
    ) -> "BuddyForCausalLM":
        """What can be told of a model before its weights are fetched; it runs nothing.

        It refuses what the model itself would refuse.

        Args:
            name: As for `from_pretrained`.
            engine: As for `from_pretrained`.
            **options: `policy`, `kv_policy` and `on_progress`, as for `from_pretrained`.

        Raises:
            BuddyError: As `from_pretrained`, and as the constructor.
        """
        return cls._assembled(outline_parts(name, **options), engine)

    @classmethod
    def _assembled(cls, parts: ModelParts, engine: EngineName) -> "BuddyForCausalLM":
        return cls(
            parts.hf_model,
            policy=parts.policy,
            kv_policy=parts.kv_policy,
            engine=engine,
            origin=parts.origin,
            card=parts.card,
            **parts.routing,
        )

    def save_pretrained(
        self, folder: str | Path, *, include_backbone: bool | None = None, tokenizer: Any = None
    ) -> None:
        """Write a Buddy checkpoint: safetensors and JSON, the PEFT adapter in its own folder.

        Args:
            folder: Made, or replaced if it holds a Buddy checkpoint.
            include_backbone: Write the backbone's weights too. By default only where the model
                was not loaded from a place that it can be loaded from again, or has changed.
            tokenizer: Written too. A checkpoint with its own backbone has no other.

        Raises:
            CheckpointError: The folder holds something else or cannot be written, or the model
                could not be loaded again.
        """
        parts = ModelParts(
            hf_model=self.model,
            routing=self._routing(),
            policy=written_policy(self.policy, self.policy_spec),
            kv_policy=self.kv_policy,
            origin=self.origin,
            card=self.card,
        )
        save(parts, user_path(folder), include_backbone=include_backbone, tokenizer=tokenizer)

    # Lanes and plans are another shape at every step: a compiler would start anew each time.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    @takes_old_cache_name  # type: ignore[untyped-decorator]  # transformers' own
    def forward(
        self,
        input_ids: Int[Tensor, "batch tokens"] | None = None,
        attention_mask: Int[Tensor, "batch columns"]
        | Bool[Tensor, "batch columns"]
        | Float[Tensor, "batch columns"]
        | None = None,
        *,
        budget: Budgets | None = None,
        prefill_budget: BudgetLike | None = None,
        budget_rows: Int[Tensor, " batch"] | None = None,
        prompt_mask: Bool[Tensor, "batch tokens"] | None = None,
        cache: Any = None,
        labels: Int[Tensor, "batch tokens"] | None = None,
        num_items_in_batch: int | Tensor | None = None,
        use_cache: bool | None = None,
        reroute: Reroute = "step",
        batch_route: BatchRoute = "independent",
        kv_policy: KVPolicy | None = None,
        logits_to_keep: int | Tensor = 0,
        trace: DepthTrace | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> RoutedOutput | tuple[Any, ...]:
        """Run each row under its budget.

        Args:
            input_ids: New tokens; pads on either side.
            attention_mask: 0 = pad, over all columns so far; None = no pads.
            budget: One for all rows, one per row, or block counts as a tensor; None = full depth.
                "auto" is chosen from the tokens that the route may see, when a session begins;
                later in a session the row goes on as it is. A callable is given the row's
                `Progress` and returns a budget.
            prefill_budget: Of the prompt's tokens, where it is another than the answer's; the
                prompt is what a session is first fed.
            budget_rows: By row, its place in `budget`, where that is a tuple of sources.
            prompt_mask: Tokens that the route may see; by default all that are no pads. When the
                continuation is fed along with the prompt, mark the prompt alone.
            cache: The `Session` of earlier steps.
            labels: Targets as in transformers (-100 = ignored); adds `loss`.
            num_items_in_batch: The loss is divided by it, in place of the number of targets.
            use_cache: Return a session to continue from; by default when gradients are off.
            reroute: "step", "prefill" or a number of decode steps.
            batch_route: "independent" ranks blocks for each row; "shared" has one ranking.
            kv_policy: What skipped blocks leave in a new session's cache.
            logits_to_keep: Compute logits of the last columns alone, or of the columns in a tensor;
                0 = of all.
            trace: Collects plans and times.
            return_dict: False returns a tuple, in which what ran has no place.
            **others: What transformers' models take beside; refused, but for None and False.

        Returns:
            A `RoutedOutput`.

        Raises:
            BudgetError: A budget cannot be read or spent.
            PromptError: No tokens, more than the context holds, or ids that the model has not.
            PolicyError: An input that routing gives no meaning.
        """
        check_inputs(others)
        if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep):
            raise PolicyError("labels need all logits: leave logits_to_keep at 0")
        if input_ids is None:
            raise PromptError("there are no new tokens: expected input_ids")
        valid = self._valid(input_ids, attention_mask)
        session = cache
        check_shapes(
            input_ids,
            valid=valid,
            prompt_mask=prompt_mask,
            session=session,
            backbone=self.backbone,
        )
        batch, tokens = input_ids.shape
        if session is not None:
            check_columns(session, attention_mask, session.get_seq_length() + tokens)
        sees = None if prompt_mask is None else valid & prompt_mask.bool()
        if session is None or session.steps == 0:
            check_prompts(input_ids, valid, self.backbone)
        if session is None and (use_cache or (use_cache is None and not torch.is_grad_enabled())):
            session = self.new_session(batch, max(INITIAL_SLOTS, 2 * tokens), kv_policy)
        if session is not None and session.steps == 0 and not torch.is_grad_enabled():
            self.executor.refresh()
        policy = self.inference_policy()
        # What is made once, the kernel and the token table, is no part of a pass's time.
        started_s = 0.0 if trace is None else trace.clock()
        if budget_rows is not None:
            budget = [cast(Any, budget)[place] for place in budget_rows.tolist()]
        wanted = self.read_sources(budget, prefill_budget, batch)
        rows = valid.any(1).nonzero()[:, 0].tolist()
        if not rows:
            raise PromptError("there are no new tokens: attention_mask calls every one a pad")
        feed = Feed.of_batch(input_ids, valid, sees)
        if session is not None and session.steps:
            check_ids(feed.token_ids, self.backbone)
        ways = check_batch_route(batch_route)
        check_reroute(reroute)
        if session is None:
            chosen = self.choose_sources(wanted, input_ids, valid, valid if sees is None else sees)
            new = [SequenceState(row=row, source=source) for row, source in enumerate(chosen)]
            budgets = ask_budgets(new, feed, self.num_blocks)
            out = run_once(self.backbone, policy, feed, budgets, batch_route=ways)
        else:
            begun = session.state
            try:
                held = self._held(session, wanted, rows, reroute, input_ids, valid, sees)
                numbers = list(session.sequences)
                step = Step(
                    sequence_ids=[numbers[row] for row in rows],
                    feed=feed,
                    sequences=held,
                    batch_route=ways,
                    columns=tokens,
                )
                executor = None if torch.is_grad_enabled() else self.executor.fast_path()
                out = run_step(self.backbone, policy, session, step, executor=executor)
            except BaseException:
                session.rewind(begun)
                raise
        logits = self._logits(out, valid, logits_to_keep)
        if trace is not None:
            trace.record(out, started_s, tokens=tokens, rows=rows, batch=batch)
        loss = None
        if labels is not None:
            loss = cast(Any, self.model).loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        made = RoutedOutput(
            loss=loss,
            logits=logits,
            cache=session,
            plan=_by_row(out, rows, batch),
            executed_blocks=_executed_by_row(out, rows, batch),
            lanes=out,
        )
        return made.to_tuple() if return_dict is False else made

    def new_session(self, batch: int, slots: int, kv_policy: KVPolicy | None = None) -> Session:
        """An empty session for a batch, with room for `slots` columns at first."""
        if self.device.type == "cuda":  # sessions of like sizes share what is captured
            slots = 1 << max(6, (slots - 1).bit_length())
        return Session(self.backbone, batch, slots, kv_policy or self.kv_policy)

    def _valid(
        self, input_ids: Int[Tensor, "batch tokens"], attention_mask: Tensor | None
    ) -> Bool[Tensor, "..."]:
        if attention_mask is None:
            return torch.ones_like(input_ids, dtype=torch.bool)
        return attention_mask[..., max(0, attention_mask.shape[-1] - input_ids.shape[-1]) :].bool()

    def _held(
        self,
        session: Session,
        wanted: tuple[BudgetSource | None, ...],
        rows: list[int],
        reroute: Reroute,
        input_ids: Int[Tensor, "batch tokens"],
        valid: Bool[Tensor, "batch tokens"],
        sees: Bool[Tensor, "batch tokens"] | None,
    ) -> list[SequenceState]:
        """The sequences of a batch as they go on: each row with its source and its rule."""
        if not session.sequences:
            chosen = self.choose_sources(wanted, input_ids, valid, valid if sees is None else sees)
            for source in chosen:
                session.join(source, reroute=reroute)
        now = list(session.sequences.values())
        if len(now) != len(valid):
            raise PromptError(
                f"the session holds {len(now)} sequences and {len(valid)} rows came: a session "
                "that sequences have joined or left by themselves is fed by run_step"
            )
        return [
            replace(now[row], source=wanted[row] or now[row].source, reroute=reroute)
            for row in rows
        ]

    def _logits(
        self, out: StepOutput, valid: Bool[Tensor, "batch tokens"], keep: int | Tensor
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits in the caller's columns; those of pads mean nothing."""
        made = out.hidden if out.logits is None else out.logits
        if out.lanes.num == valid.numel():
            placed = made.view(*valid.shape, -1)
        else:
            placed = made.new_zeros(*valid.shape, made.shape[1])
            placed = placed.index_put((valid,), made)
        placed = placed[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]
        if out.logits is not None:
            return placed
        executor = None if out.engine == GENERAL else self.executor.fast_path()
        return logits_of(self.backbone, out, executor, hidden=placed)


def _by_row(out: StepOutput, rows: list[int], batch: int) -> DepthPlan:
    """What the last new token of each row ran; nothing, where a row was fed pads alone."""
    last = out.last_plan
    if len(rows) == batch:
        return last
    host = np.zeros((batch, last.host.shape[1]), np.bool_)
    host[rows] = last.host
    return DepthPlan.of_lanes(host, out.plan.device)


def _executed_by_row(out: StepOutput, rows: list[int], batch: int) -> Int[Tensor, " batch"]:
    made = torch.zeros(batch, dtype=torch.long)
    made[rows] = out.executed[torch.from_numpy(out.lanes.last)]
    return made
