"""Generation under a budget: transformers' own loop, with a session as its cache."""

import math
from abc import abstractmethod
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from buddy.depth.budget import BudgetLike, parse_budget
from buddy.depth.budget_source import BudgetSource
from buddy.engine.run import check_reroute
from buddy.engine.state.cache import KVPolicy
from buddy.engine.state.sequence import Reroute
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute, check_batch_route
from buddy.errors import ModelError, PolicyError, PromptError
from buddy.generation.budgets import BudgetReader, Budgets
from buddy.generation.loop import decode_loop, loops_here
from buddy.generation.padding import left_padded
from buddy.generation.speculative import check_speculation, speculative_loop
from buddy.generation.trace import DepthTrace


class ContextEnd(MaxLengthCriteria):
    """Stops a generation that has filled the model's context; beside the caller's own limit."""


class FiniteLogits(LogitsProcessor):
    """Refuses logits that no token can be chosen by, before any is.

    Minus infinity is how a token is forbidden, so the largest logit of a row is what must be a
    number.
    """

    def __call__(
        self, input_ids: Int[Tensor, "batch columns"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """The logits as they are.

        Raises:
            ModelError: A row's are NaN or infinite.
        """
        if not all(map(math.isfinite, scores.amax(-1).tolist())):
            raise ModelError(
                f"the logits after {input_ids.shape[1]} tokens are not finite: the weights are "
                "damaged, or too large for their number format; fetch or copy the model again, or "
                "load it with dtype=torch.float32"
            )
        return scores


def check_vocabulary(prompt: Int[Tensor, "batch tokens"], vocab_size: int) -> None:
    """Refuse tokens that the model does not know.

    Raises:
        PromptError: There is one.
    """
    low, high = (int(one) for one in prompt.aminmax())
    if low < 0 or high >= vocab_size:
        raise PromptError(
            f"a prompt has the token {high if low >= 0 else low}, and the model knows those from 0 "
            f"to {vocab_size - 1}: use the model's own tokenizer"
        )


def check_prompts(valid: Bool[Tensor, "batch tokens"], context: int) -> None:
    """Refuse a batch with an empty row, or with one that the context does not hold.

    Raises:
        PromptError: Such a row.
    """
    lengths = valid.sum(1).tolist()
    if not lengths or min(lengths) == 0:
        raise PromptError("a prompt has no tokens: expected at least one")
    if max(lengths) > context:
        raise PromptError(
            f"a prompt has {max(lengths)} tokens, but the model's context holds {context}: "
            "shorten it"
        )


def check_shapes(
    token_ids: Tensor, *, valid: Tensor, prompt_mask: Tensor | None, session: Session | None
) -> None:
    """Refuse masks and sessions that do not fit the tokens.

    Raises:
        PromptError: One does not fit, or there are no tokens.
    """
    if token_ids.shape[1] == 0:
        raise PromptError("there are no new tokens: expected at least one column")
    for name, mask in (("attention_mask", valid), ("prompt_mask", prompt_mask)):
        if mask is not None and mask.shape != token_ids.shape:
            raise PromptError(
                f"{name} has shape {list(mask.shape)} over the new tokens, "
                f"expected {list(token_ids.shape)}"
            )
    if session is not None and session.batch != len(token_ids):
        raise PromptError(
            f"the session holds {session.batch} rows and {len(token_ids)} came: "
            "feed all rows of a batch at every step"
        )


def check_options(options: dict[str, Any]) -> None:
    """Refuse options of transformers' `generate` that routing gives no meaning.

    Raises:
        PolicyError: There is one.
    """
    config = options.get("generation_config")
    for name, why in _REFUSED.items():
        value = options.get(name, getattr(config, name, None))
        is_given = value is not None and value is not False
        if value is False if name == "use_cache" else is_given:
            raise PolicyError(f"generate takes no {name}={value!r}: {why}")


_REFUSED = {
    "use_cache": "plans of earlier tokens live in the cache",
    "prefill_chunk_size": "the first plan is chosen from the whole prompt",
    "prompt_mask": "the whole prompt is routed; mark a part of it in forward",
    # The native engine calls no module, and no attention but "eager" makes weights.
    "output_hidden_states": (
        'a skipped block has none; use hooks on the blocks with engine="general"'
    ),
    "output_attentions": (
        'a skipped block has none; use hooks on the blocks with engine="general" and '
        'attention="eager"'
    ),
}


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

    @torch.no_grad()
    def generate(  # type: ignore[override]  # transformers leaves its own untyped
        self,
        inputs: Int[Tensor, "batch tokens"] | None = None,
        *,
        budget: Budgets | None = None,
        prefill_budget: BudgetLike | None = None,
        reroute: Reroute = "step",
        batch_route: BatchRoute = "independent",
        kv_policy: KVPolicy | None = None,
        trace: DepthTrace | None = None,
        draft_budget: str | int | float | None = None,
        **options: Any,
    ) -> Any:
        """Transformers' `generate`, under a budget per row.

        Pads may stand on either side. The prompt's columns come back as they were given; new
        tokens follow from column `inputs.shape[1]` on, and end where the context does. Without an
        `attention_mask`, pad ids are taken for pads as transformers does.

        Args:
            inputs: The prompt's token ids; or pass `input_ids` by name.
            budget: One for all rows, or one per row; None = full depth. "auto" is chosen from the
                row's prompt and holds to its end. A callable is asked at every step: it is given
                the row's `Progress` and returns a budget.
            prefill_budget: Of the prompt's tokens, where it is another than the answer's. What a
                session is fed later is no prompt of its own.
            reroute: "step", "prefill" or a number of decode steps.
            batch_route: "independent" ranks blocks for each row; "shared" has one ranking.
            kv_policy: What skipped blocks leave in the cache; by default the model's own.
            trace: Collects plans and times.
            draft_budget: Draft tokens at this budget and verify them at full depth: the output is
                that of full depth. One sequence at a time.
            **options: As in transformers: sampling, streamer, stopping criteria ...

        Raises:
            BudgetError: A budget cannot be read or spent.
            PromptError: No tokens, or more than the context holds.
        """
        prompt = options.pop("input_ids", None) if inputs is None else inputs
        if not isinstance(prompt, Tensor) or prompt.ndim != 2 or prompt.numel() == 0:
            raise PromptError("a prompt has no tokens: expected input_ids of shape [batch, tokens]")
        check_options(options)
        check_vocabulary(prompt, self.config.vocab_size)
        mask = options.pop("attention_mask", None)
        mask = self._mask_from_pads(prompt) if mask is None else mask
        wanted = self.read_sources(budget, prefill_budget, len(prompt))
        check_prompts(mask.bool(), self.config.max_position_embeddings)
        ids, mask = left_padded(prompt, mask)
        sources = self.choose_sources(wanted, ids, mask.bool(), mask.bool())
        room = self.config.max_position_embeddings - int(mask.sum(1).max())
        stopping = StoppingCriteriaList(options.pop("stopping_criteria", None) or [])
        # The token after a full context can still be predicted, but not fed.
        stopping.append(ContextEnd(ids.shape[1] + room + 1))
        processors = LogitsProcessorList(options.pop("logits_processor", None) or [])
        processors.append(FiniteLogits())
        # Bound here, as transformers hands a streamer to no loop but its own.
        streamer = options.get("streamer")
        if draft_budget is not None:
            draft = self._draft_blocks(draft_budget, sources, options)
            options["custom_generate"] = partial(
                speculative_loop, draft_blocks=draft, streamer=streamer
            )
        elif loops_here(options, self.generation_config):
            options["custom_generate"] = partial(decode_loop, streamer=streamer)
        out = cast(Any, super()).generate(
            ids,
            attention_mask=mask,
            budget=sources,
            budget_rows=torch.arange(len(prompt), device=ids.device),
            reroute=check_reroute(reroute),
            batch_route=check_batch_route(batch_route),
            kv_policy=kv_policy or self.kv_policy,
            trace=trace,
            stopping_criteria=stopping,
            logits_processor=processors,
            **options,
        )
        sequences = out if isinstance(out, Tensor) else out.sequences
        copies = len(sequences) // len(prompt)
        sequences[:, : prompt.shape[1]] = prompt.repeat_interleave(copies, dim=0)
        return out

    def _draft_blocks(
        self,
        budget: str | int | float,
        sources: tuple[BudgetSource, ...],
        options: dict[str, Any],
    ) -> int:
        draft = parse_budget(budget, self.backbone.num_blocks)
        if draft == "auto":
            raise PolicyError("draft_budget is a number: auto is chosen for what is put out")
        if not loops_here(options, self.generation_config):
            raise PolicyError("draft_budget goes with greedy decoding and sampling alone")
        copies = options.get("num_return_sequences", self.generation_config.num_return_sequences)
        check_speculation(
            len(sources) * (copies or 1), sources[0], self.backbone.num_blocks, draft.blocks
        )
        return draft.blocks

    def _mask_from_pads(self, prompt: Int[Tensor, "batch tokens"]) -> Tensor:
        """As transformers infers it: pad ids are pads, unless they also end sequences."""
        pad, eos = self.generation_config.pad_token_id, self.generation_config.eos_token_id
        ends = eos if isinstance(eos, list) else [eos]
        if pad is None or pad in ends:
            return torch.ones_like(prompt)
        mask: Tensor = (prompt != pad).long()
        return mask

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Called by transformers: a session instead of its own cache."""
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache:
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            model_kwargs["past_key_values"] = self.new_session(
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
