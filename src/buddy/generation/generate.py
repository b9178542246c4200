"""Generation under a budget: transformers' own loop, with a session as its cache."""

import logging
from abc import abstractmethod
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerationMixin

from buddy.budget.request import BudgetLike, read_blocks
from buddy.budget.source import BudgetSource
from buddy.budget.thinking import read_thinking_tokens
from buddy.engine.run import check_reroute
from buddy.engine.state.cache import KVPolicy
from buddy.engine.state.sequence import Reroute
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute, check_batch_route
from buddy.errors import PolicyError, PromptError
from buddy.generation.budgets import BudgetReader, Budgets
from buddy.generation.draft_checks import check_drafts
from buddy.generation.drafted_rows import drafted_rows_loop
from buddy.generation.drafts import Drafts, DraftsLike, read_drafts
from buddy.generation.loop import EndedRows, decode_loop
from buddy.generation.next_token import FiniteLogits
from buddy.generation.options import Prepared, takes_old_cache_name
from buddy.generation.padded import (
    check_columns,
    check_new_tokens,
    check_prompts,
    check_shapes,
    left_padded,
)
from buddy.generation.speculative import speculative_loop
from buddy.generation.thinking import ThinkingProcessor
from buddy.generation.trace import DepthTrace, FinishReason, finish_reasons

_LOG = logging.getLogger(__name__)


def _prompt_of(inputs: Any, options: dict[str, Any]) -> Any:
    """The prompt, which may be passed as either.

    Raises:
        PromptError: It is none, or both.
    """
    named = options.pop("input_ids", None)
    if named is not None and inputs is not None:
        raise PromptError("a prompt came as inputs and as input_ids: pass one of them")
    prompt = named if inputs is None else inputs
    if not isinstance(prompt, Tensor) and options.get("inputs_embeds") is None:  # refused later
        raise PromptError(
            "a prompt has no tokens: expected a tensor of ids [batch, tokens], got "
            f"{'none' if prompt is None else type(prompt).__name__}; pass "
            '**tokenizer(text, return_tensors="pt")'
        )
    return prompt


def _drafts_of(drafts: DraftsLike, options: dict[str, Any]) -> Drafts:
    """What the text is drafted from, which may be passed by an older name.

    Raises:
        PolicyError: It came by both names.
    """
    older = options.pop("draft_budget", None)
    if older is None:
        return read_drafts(drafts)
    if drafts is not None:
        raise PolicyError("draft_budget is an older name of drafts: pass drafts alone")
    return Drafts(budget=read_blocks(older, "draft_budget"))


class BudgetedGeneration(BudgetReader, GenerationMixin):
    """transformers' `generate` for a model that takes a budget."""

    config: Any
    generation_config: Any
    kv_policy: KVPolicy
    main_input_name = "input_ids"
    input_modalities = ("text",)
    base_model_prefix = "model"
    _is_stateful = True  # assisted generation needs a cache that can be cut back

    @abstractmethod
    def new_session(self, batch: int, slots: int, kv_policy: KVPolicy | None = None) -> Session:
        """An empty session for a batch."""

    @takes_old_cache_name  # type: ignore[untyped-decorator]  # transformers' own
    @torch.no_grad()
    def generate(  # type: ignore[override, unused-ignore]  # typed or not by version
        self,
        inputs: Int[Tensor, "batch tokens"] | None = None,
        *,
        budget: Budgets | None = None,
        prefill_budget: BudgetLike | None = None,
        reroute: Reroute = "step",
        batch_route: BatchRoute = "independent",
        kv_policy: KVPolicy | None = None,
        thinking_tokens: int | None = None,
        trace: DepthTrace | None = None,
        drafts: DraftsLike = None,
        **options: Any,
    ) -> Any:
        """Transformers' `generate`, under a budget per row.

        Pads may stand on either side. The prompt's columns come back as they were given; new
        tokens follow from column `inputs.shape[1]` on, and end where the context does. Without an
        `attention_mask`, pad ids are taken for pads as transformers does.

        Args:
            inputs: The prompt's token ids, on any device; or pass `input_ids` by name.
            budget: One for all rows, or one per row; None = full depth. "auto" is chosen from the
                row's prompt and holds to its end. "mean:0.7" is a mean over the
                answer's tokens, which the model's ledger spends; the prompt runs that mean, rounded
                down. A callable is asked at every step: it is given the row's `Progress` and
                returns a budget.
            prefill_budget: Of the prompt's tokens, where it is another than the answer's. What a
                session is fed later is no prompt of its own.
            reroute: "step", "prefill" or a number of decode steps.
            batch_route: "independent" ranks blocks for each row; "shared" has one ranking.
            kv_policy: What skipped blocks leave in the cache; by default the model's own.
            thinking_tokens: Most tokens that an answer may think for, which then ends with the
                closing mark: at the end of a sentence or a line in the last quarter of the limit
                (at most its last 64 tokens), or else at the limit. None = any number.
            trace: Collects plans and times.
            drafts: What tokens are drafted from before one pass verifies them at the row's own
                budget; the text is that without drafts. "ngram" drafts what followed the last
                tokens where they stood before, while it pays; a budget, such as 0.5, drafts by
                few blocks; "ngram+0.5" does so where n-grams do not. Rows of a batch are drafted
                for in greedy decoding, and by few blocks too only while that pays.
            **options: As in transformers: sampling, streamer, stopping criteria ... And
                `draft_budget`, an older name of `drafts`.

        Raises:
            BudgetError: A budget cannot be read or spent.
            PromptError: No tokens, or more than the context holds.
        """
        prompt, drafts = _prompt_of(inputs, options), _drafts_of(drafts, options)
        prepared, options = Prepared.read(self, options)
        device, mask = self.backbone.device, options.pop("attention_mask", None)
        prompt = prompt.to(device)
        mask = prepared.mask_from_pads(prompt) if mask is None else mask.to(device)
        session = options.get("cache")
        check_shapes(prompt, valid=mask, prompt_mask=None, session=session, backbone=self.backbone)
        wanted = self.read_sources(budget, prefill_budget, len(prompt))
        check_prompts(prompt, mask.bool(), self.backbone)
        check_columns(session, mask, prompt.shape[1])
        seen = check_new_tokens(session, mask)
        if prepared.is_guided and not (budget is None and prefill_budget is None):
            raise PolicyError(
                "guidance_scale runs another prompt too, which a budget does not reach: leave the "
                "budget out"
            )
        ids, mask = left_padded(prompt.long(), mask.bool().long(), seen)
        sources = self.choose_sources(wanted, ids, mask.bool(), mask.bool())
        columns, longest = ids.shape[1], int(mask.sum(1).max())
        # The token after a full context can still be predicted, but not fed.
        end = columns + self.backbone.context - longest + 1
        prepared, is_cut = prepared.end_at(columns, end)
        processors = LogitsProcessorList(options.pop("logits_processor", None) or [])
        processors.append(FiniteLogits())
        if thinking_tokens is not None:
            limit = read_thinking_tokens(thinking_tokens, self.thinking_marks)
            processors.append(ThinkingProcessor(limit, ids))
        if drafts:
            options["draft_blocks"] = self._draft_blocks(drafts, sources, prepared, options)
            options["ngrams"] = drafts.ngrams
        out = cast(Any, super()).generate(
            ids,
            generation_config=prepared,
            attention_mask=mask,
            budget=sources,
            budget_rows=torch.arange(len(prompt), device=ids.device),
            reroute=check_reroute(reroute),
            batch_route=check_batch_route(batch_route),
            kv_policy=kv_policy or self.kv_policy,
            trace=trace,
            logits_processor=processors,
            **options,
        )
        sequences = out if isinstance(out, Tensor) else getattr(out, "sequences", None)
        if sequences is not None:  # a custom_generate returns what it likes
            copies = len(sequences) // len(prompt)
            sequences[:, :columns] = prompt.repeat_interleave(copies, dim=0)
            reasons = finish_reasons(sequences, prepared.config, is_cut=is_cut)
            self._report(reasons, sequences.shape[1] - columns, trace)
        return out

    def _report(
        self, reasons: tuple[FinishReason, ...], new_tokens: int, trace: DepthTrace | None
    ) -> None:
        """Tell the trace why sequences ended, and the log where a full context ended one."""
        context = self.backbone.context
        if trace is not None:
            trace.finish(reasons, context)
        if "context" in reasons:
            _LOG.warning(
                "generation stopped after %d new tokens: the context of %d tokens is full",
                new_tokens,
                context,
            )

    def _draft_blocks(
        self,
        drafts: Drafts,
        sources: tuple[BudgetSource, ...],
        prepared: Prepared,
        options: dict[str, Any],
    ) -> int | None:
        if prepared.is_guided or options.get("custom_generate") or not prepared.writes_tokens_alone:
            raise PolicyError(
                "drafts go with greedy decoding and sampling alone, and return tokens: leave them "
                "out, or beams, guidance_scale, custom_generate and return_dict_in_generate"
            )
        return check_drafts(drafts, self.policy, sources, self.backbone.num_blocks)

    def _sample(  # transformers calls the four methods below, and leaves its own untyped
        self,
        input_ids: Int[Tensor, "batch tokens"],
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        *,
        ngrams: bool | None = None,
        draft_blocks: int | None = None,
        **inputs: Any,
    ) -> Any:
        """Greedy decoding and sampling: by a loop of Buddy's where only tokens are returned."""
        steps = (input_ids, logits_processor, stopping_criteria, generation_config)
        if ngrams is not None:
            drafted_loop = speculative_loop if len(input_ids) == 1 else drafted_rows_loop
            inputs |= {"ngrams": ngrams, "draft_blocks": draft_blocks}
            return drafted_loop(self, *steps, streamer, **inputs)
        if synced_gpus or generation_config.return_dict_in_generate:
            criteria = EndedRows(stopping_criteria, inputs["cache"])
            steps = (input_ids, logits_processor, criteria, generation_config)
            out = cast(Any, super())._sample(*steps, synced_gpus, streamer, **inputs)
            criteria.take_pads_back()
            return out
        return decode_loop(self, *steps, streamer, **inputs)

    def prepare_inputs_for_generation(  # type: ignore[override, unused-ignore]
        self, input_ids: Tensor, tokenizer: Any = None, **inputs: Any
    ) -> Any:
        """What a step of transformers' loops feeds; a tokenizer is for stop strings alone."""
        return cast(Any, super()).prepare_inputs_for_generation(input_ids, **inputs)

    def _prepare_generation_config(self, generation_config: Any = None, **options: Any) -> Any:
        """What `generate` has prepared is taken as it is."""
        if isinstance(generation_config, Prepared):
            return generation_config.config, options
        return cast(Any, super())._prepare_generation_config(generation_config, **options)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """`Prepared` has seen to it."""

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Called by transformers: a session instead of its own cache."""
        if model_kwargs.get("cache") is not None:
            model_kwargs["cache"]._is_user_defined = True
        elif generation_config.use_cache:
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            model_kwargs["cache"] = self.new_session(
                batch_size * copies,
                min(max_cache_length, self.config.max_position_embeddings),
                model_kwargs["kv_policy"],
            )

    def is_remote_code(self) -> bool:
        """Called by transformers; Buddy runs no code from a checkpoint."""
        return False

    def get_experts_implementation(self) -> dict[str, str]:
        """Called by transformers; blocks keep whatever their own model runs experts by."""
        return {}
