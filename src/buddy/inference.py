"""InferenceModel: a causal LM that runs under a budget, pass by pass.

It is all of `BuddyForCausalLM` but transformers' `generate`, whose code takes longer to import than
a short answer takes to be written; and a skeleton will do for its model.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.budget.source import BudgetSource
from buddy.budget.thinking import ThinkingMarks
from buddy.checkpoint.load import LoadOptions, load_parts, outline_parts
from buddy.checkpoint.parts import ModelParts
from buddy.checkpoint.resolve import ModelName, Resolved, resolve
from buddy.composed import ComposedModel
from buddy.depth.policy import Policy
from buddy.engine.executors.choice import EngineName
from buddy.engine.executors.protocol import GENERAL
from buddy.engine.fork_guard import check_threads
from buddy.engine.run import check_reroute, run_once, run_step
from buddy.engine.state.cache import KVPolicy
from buddy.engine.state.sequence import SequenceState
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute, check_batch_route
from buddy.engine.step import Step, StepOutput, ask_budgets, logits_of
from buddy.errors import PolicyError, PromptError
from buddy.generation.budgets import BudgetReader, Budgets
from buddy.generation.options import ForwardOptions, check_inputs, takes_old_cache_name
from buddy.generation.output import RoutedOutput
from buddy.generation.padded import PaddedBatch
from buddy.hub.progress import OnFetch

INITIAL_SLOTS = 256


class InferenceModel(ComposedModel, BudgetReader):
    """Runs exactly as many blocks as each row's budget says, chosen by a policy.

    The arguments are those of `BuddyForCausalLM`; in place of transformers' model, a skeleton.
    """

    _named: Resolved | None = None
    """The name that it was found by, where it was loaded by one."""

    @cached_property
    def thinking_marks(self) -> ThinkingMarks | None:
        """The marks around what it thinks aloud, of the tokenizer that goes with its name.

        None where its chat template has none. Set them where a model was not loaded by a name:
        `model.thinking_marks = ThinkingMarks.of(tokenizer)`.

        Raises:
            ModelError: The tokenizer cannot be fetched or understood.
        """
        return None if self._named is None else ThinkingMarks.of(self._named.load_tokenizer())

    @classmethod
    def load(
        cls, name: ModelName, *, engine: EngineName = "auto", **options: Unpack[LoadOptions]
    ) -> "InferenceModel":
        """Load a model to run it, with its adapter merged.

        Args:
            name: As `BuddyForCausalLM.from_pretrained` takes it.
            engine: The same.
            **options: The same.

        Raises:
            ModelError: The same, and so are others.
        """
        check_threads()
        options["merge_adapter"] = True
        named = resolve(name)
        parts = load_parts(named, only_runs=True, **options)
        return cast(InferenceModel, cls.of_parts(parts, engine, named))

    @classmethod
    def describe(
        cls,
        name: ModelName,
        *,
        policy: str | None = None,
        kv_policy: KVPolicy | None = None,
        engine: EngineName = "auto",
        on_progress: OnFetch | None = None,
    ) -> "InferenceModel":
        """Describe a model before its weights are loaded; this one runs nothing.

        Raises:
            BuddyError: As `load`, and as the constructor.
        """
        named = resolve(name)
        parts = outline_parts(
            named, only_runs=True, policy=policy, kv_policy=kv_policy, on_progress=on_progress
        )
        return cast(InferenceModel, cls.of_parts(parts, engine, named))

    @classmethod
    def of_parts(
        cls, parts: ModelParts, engine: EngineName = "auto", named: Resolved | None = None
    ) -> Any:
        """Put a model together.

        Args:
            parts: As a checkpoint gives them.
            engine: As for the constructor.
            named: The name that the parts were found by; None = they were not.

        Raises:
            PolicyError: The policy cannot serve this model.
        """
        model = cls(
            parts.hf_model,
            policy=parts.policy,
            kv_policy=parts.kv_policy,
            engine=engine,
            origin=parts.origin,
            card=parts.card,
            **parts.routing,
        )
        model._named = named
        return model

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
        prompt_mask: Bool[Tensor, "batch tokens"] | None = None,
        cache: Any = None,
        labels: Int[Tensor, "batch tokens"] | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Unpack[ForwardOptions],
    ) -> RoutedOutput | tuple[Any, ...]:
        """Run each row under its budget.

        Args:
            input_ids: New tokens; pads on either side.
            attention_mask: 0 = pad, over all columns so far; None = no pads.
            budget: One for all rows, one per row, or block counts as a tensor; None = full depth.
                "auto" is chosen from the tokens that the route may see, when a session begins;
                later in a session the row goes on as it is. A callable is given the row's
                `Progress` and returns a budget.
            prompt_mask: Tokens that the route may see; by default all that are no pads. When the
                continuation is fed along with the prompt, mark the prompt alone.
            cache: The `Session` of earlier steps.
            labels: Targets as in transformers (-100 = ignored); adds `loss`.
            logits_to_keep: Compute logits of the last columns alone, or of the columns in a tensor;
                0 = of all.
            **options: `prefill_budget`, `reroute`, `batch_route`, `kv_policy`, `use_cache`,
                `trace` and others of `generation.options.ForwardOptions`. What transformers' models
                take beside is refused, but for None and False.

        Returns:
            A `RoutedOutput`.

        Raises:
            BudgetError: A budget cannot be read or spent.
            PromptError: No tokens, more than the context holds, or ids that the model has not.
            PolicyError: An input that routing gives no meaning.
        """
        check_inputs(options)
        if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep):
            raise PolicyError("labels need all logits: leave logits_to_keep at 0")
        batch = PaddedBatch.read(input_ids, attention_mask, prompt_mask, cache, self.backbone)
        session = self._session(cache, batch, options)
        if session is not None and session.steps == 0 and not torch.is_grad_enabled():
            self.executor.refresh()
        # What is made once, the kernel and the token table, is no part of a pass's time.
        policy, trace = self.inference_policy(), options.get("trace")
        started_s = 0.0 if trace is None else trace.start(self.backbone.devices)
        places = options.get("budget_rows")
        if places is not None:
            budget = [cast(Any, budget)[place] for place in places.tolist()]
        wanted = self.read_sources(budget, options.get("prefill_budget"), batch.num_rows)
        if session is None:
            out = self._run_once(policy, batch, wanted, options)
        else:
            out = self._run_step(policy, session, batch, wanted, options)
        logits = self._logits(out, batch, logits_to_keep)
        if trace is not None:
            trace.record(
                out, started_s, tokens=batch.num_columns, rows=batch.rows, batch=batch.num_rows
            )
        loss = None
        if labels is not None:
            loss = cast(Any, self.model).loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=options.get("num_items_in_batch"),
            )
        routed = RoutedOutput(
            loss=loss,
            logits=logits,
            cache=session,
            plan=batch.last_plan(out),
            executed_blocks=batch.executed(out),
            lanes=out,
        )
        return routed.to_tuple() if options.get("return_dict") is False else routed

    def _session(
        self, cache: Session | None, batch: PaddedBatch, options: ForwardOptions
    ) -> Session | None:
        """The session that goes on, or a new one where the caller wants one."""
        use_cache = options.get("use_cache")
        if cache is None and (use_cache or (use_cache is None and not torch.is_grad_enabled())):
            slots = max(INITIAL_SLOTS, 2 * batch.num_columns)
            return self.new_session(batch.num_rows, slots, options.get("kv_policy"))
        return cache

    def new_session(self, batch: int, slots: int, kv_policy: KVPolicy | None = None) -> Session:
        """An empty session for a batch, with room for `slots` columns at first."""
        if self.device.type == "cuda":  # sessions of like sizes share what is captured
            slots = 1 << max(6, (slots - 1).bit_length())
        return Session(self.backbone, batch, slots, kv_policy or self.kv_policy)

    def _run_once(
        self,
        policy: Policy,
        batch: PaddedBatch,
        wanted: Sequence[BudgetSource | None],
        options: ForwardOptions,
    ) -> StepOutput:
        """Run a pass that keeps no session, such as one of training."""
        check_reroute(options.get("reroute", "step"))
        sources = self.choose_sources(wanted, *batch.prompts)
        new = [SequenceState(row=row, source=source) for row, source in enumerate(sources)]
        budgets = ask_budgets(new, batch.feed, self.num_blocks)
        return run_once(
            self.backbone, policy, batch.feed, budgets, batch_route=_batch_route(options)
        )

    def _run_step(
        self,
        policy: Policy,
        session: Session,
        batch: PaddedBatch,
        wanted: Sequence[BudgetSource | None],
        options: ForwardOptions,
    ) -> StepOutput:
        """Run a pass of a session, which stays as it was if the pass fails."""
        batch_route = _batch_route(options)
        reroute = check_reroute(options.get("reroute", "step"))
        begun = session.state
        try:
            if not session.sequences:
                for source in self.choose_sources(wanted, *batch.prompts):
                    session.join(source, reroute=reroute)
            sequence_ids, states = list(session.sequences), list(session.sequences.values())
            if len(states) != batch.num_rows:
                raise PromptError(
                    f"the session holds {len(states)} sequences and {batch.num_rows} rows came: a "
                    "session that sequences have joined or left by themselves is fed by run_step"
                )
            step = Step(
                sequence_ids=[sequence_ids[row] for row in batch.rows],
                feed=batch.feed,
                sequences=[
                    replace(states[row], source=wanted[row] or states[row].source, reroute=reroute)
                    for row in batch.rows
                ],
                batch_route=batch_route,
                columns=batch.num_columns,
            )
            executor = None if torch.is_grad_enabled() else self.executor.fast_path()
            return run_step(self.backbone, policy, session, step, executor=executor)
        except BaseException:
            session.rewind(begun)
            raise

    def _logits(
        self, out: StepOutput, batch: PaddedBatch, keep: int | Tensor
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits in the caller's columns; those of pads mean nothing."""
        columns = batch.in_columns(out.hidden if out.logits is None else out.logits)
        columns = columns[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]
        if out.logits is not None:
            return columns
        executor = None if out.engine == GENERAL else self.executor.fast_path()
        return logits_of(self.backbone, out, executor, hidden=columns)


def _batch_route(options: ForwardOptions) -> BatchRoute:
    return check_batch_route(options.get("batch_route", "independent"))
