"""Options of transformers' `generate`: read in one place, and refused where they mean nothing here.

transformers drops an option that its loop does not use. Here nothing is dropped: an option works as
in transformers, or is refused with the reason.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypedDict

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.utils.deprecation import deprecate_kwarg

from buddy.budget.request import BudgetLike
from buddy.data.tokens import end_of_turn
from buddy.engine.state.cache import KVPolicy
from buddy.engine.state.sequence import Reroute
from buddy.engine.steer import BatchRoute
from buddy.errors import PolicyError, PromptError
from buddy.generation.trace import DepthTrace

OWN: Final = frozenset(
    {
        "batch_route",
        "budget",
        "draft_budget",
        "drafts",
        "kv_policy",
        "prefill_budget",
        "reroute",
        "thinking_tokens",
        "trace",
    }
)
"""Buddy's own options."""
_TAKEN: Final = frozenset(
    {
        "attention_mask",
        "cache",
        "custom_generate",
        "logits_processor",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
    }
)
"""Options beside those of a `GenerationConfig`."""

takes_old_cache_name: Final = deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
"""Decorates what takes a `cache`: its name of before is taken too, with transformers' warning."""

_DRAFTS = (
    'Buddy drafts from the text itself (drafts="ngram") or with its own blocks (drafts=0.5), and '
    "needs no other model"
)
_CODE = "it is code from a repository, and Buddy runs none"
_POSITIONS = "positions follow from attention_mask: leave it out"
_CACHE = "the cache is a session, which holds what skipped blocks leave: leave it out"
_REFUSED: Final = {
    "is_assistant": "transformers cuts an assistant's cache, and a session is not cut from outside",
    "use_cache": "plans of earlier tokens live in the cache",
    "cache_implementation": _CACHE,
    "cache_config": _CACHE,
    "prefill_chunk_size": "the first plan is chosen from the whole prompt",
    "prompt_mask": "the whole prompt is routed; mark a part of it in forward",
    "inputs_embeds": "blocks are chosen from token ids: pass input_ids",
    "position_ids": _POSITIONS,
    "cache_position": _POSITIONS,
    "token_type_ids": "no supported family has token types: leave it out",
    "labels": "a loss is what forward computes",
    # The native engine calls no module, and no attention but "eager" makes weights.
    "output_hidden_states": (
        'a skipped block has none; use hooks on the blocks with engine="general"'
    ),
    "output_attentions": (
        'a skipped block has none; use hooks on the blocks with engine="general" and '
        'attention="eager"'
    ),
    "compile_config": 'decode steps have compiled code of their own: engine="auto"',
    "assistant_model": _DRAFTS,
    "assistant_tokenizer": _DRAFTS,
    "assistant_early_exit": _DRAFTS,
    "prompt_lookup_num_tokens": _DRAFTS,
    "use_mtp": _DRAFTS,
    "token_healing": (
        "it rewrites the prompt by passes that no budget reaches: pass the ids that "
        "model.heal_tokens(ids, tokenizer) returns"
    ),
    "trust_remote_code": _CODE,
    "penalty_alpha": f"contrastive search: {_CODE}",
    "dola_layers": f"DoLa: {_CODE}",
    "constraints": f"constrained beams: {_CODE}",
    "force_words_ids": f"constrained beams: {_CODE}",
    "num_beam_groups": f"group beams: {_CODE}",
}
_HARMLESS: Final = {"use_cache": True, "cache_implementation": "dynamic", "num_beam_groups": 1}
"""Values that say what is done anyway; so do None and False, but for `use_cache`."""


class ForwardOptions(TypedDict, total=False):
    """What `forward` takes beside its inputs."""

    prefill_budget: BudgetLike | None
    """Budget of the prompt's tokens, where it is another than the answer's; the prompt is what a
    session is first fed."""
    budget_rows: Int[Tensor, " batch"] | None
    """Place of each row in `budget`, where that is a tuple of sources."""
    reroute: Reroute
    """"step", "prefill" or a number of decode steps."""
    batch_route: BatchRoute
    """"independent" ranks blocks for each row; "shared" has one ranking."""
    kv_policy: KVPolicy | None
    """What skipped blocks leave in a new session's cache."""
    use_cache: bool | None
    """Return a session to continue from; by default when gradients are off."""
    trace: DepthTrace | None
    """Collects plans and times."""
    num_items_in_batch: int | Tensor | None
    """The loss is divided by it, in place of the number of targets."""
    return_dict: bool | None
    """False returns a tuple, in which what ran has no place."""


def check_inputs(options: Mapping[str, Any]) -> None:
    """Refuse what transformers' models take in `forward`, and Buddy's does not.

    Raises:
        PolicyError: There is such an input.
    """
    for name, value in options.items():
        is_ours = name in ForwardOptions.__annotations__
        if not is_ours and value is not None and value is not False:
            why = _REFUSED.get(name, "it is no input of this model; is it misspelt?")
            raise PolicyError(f"forward takes no {name}: {why}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The options of one call: the caller's, else the model's, else transformers' defaults.

    It goes to transformers' `generate` in a config's place, so that options are read once.

    Attributes:
        config: All that a `GenerationConfig` holds.
        max_length, min_length: Where the caller or the model names them.
    """

    config: GenerationConfig
    max_length: int | None
    min_length: int | None

    @classmethod
    def read(cls, model: Any, options: dict[str, Any]) -> tuple["Prepared", dict[str, Any]]:
        """Read and check options; returns also those that no config holds.

        Raises:
            PolicyError: There is one that is not taken.
        """
        from transformers.generation.utils import GenerationMixin

        given = options.pop("generation_config", None)
        if given is not None and not isinstance(given, GenerationConfig):
            raise PolicyError(
                f"generation_config must be a GenerationConfig, got a {type(given).__name__}: "
                "pass its options by name"
            )
        config, rest = GenerationMixin._prepare_generation_config(model, given, **options)
        _check(config, rest)

        def named(name: str) -> int | None:
            configs = (given, model.generation_config)
            values = (options.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in values if value is not None), None)

        return cls(config, named("max_length"), named("min_length")), rest

    @property
    def writes_tokens_alone(self) -> bool:
        """Whether it is greedy decoding or sampling, and nothing but tokens is returned."""
        return self.config.num_beams == 1 and not self.config.return_dict_in_generate

    @property
    def is_guided(self) -> bool:
        """Whether each step runs another prompt too (classifier-free guidance)."""
        return self.config.guidance_scale not in (None, 1)

    def end_at(self, columns: int, end: int) -> tuple["Prepared", bool]:
        """The options, so that no more columns are written; and whether that cuts them short.

        Args:
            columns: Of the prompt.
            end: Most columns that there may be in all.
        """
        config, new = self.config, self.config.max_new_tokens
        if new is None:
            new = config.max_length - (0 if self.max_length is None else columns)
        if columns + new <= end:
            return self, False
        config.max_new_tokens = end - columns
        return replace(self, max_length=None), True

    def mask_from_pads(self, prompt: Tensor) -> Tensor:
        """The mask that transformers infers: pad ids are pads, unless they also end sequences."""
        pads = token_numbers(self.config.pad_token_id)
        if not pads or set(pads) & set(token_numbers(self.config.eos_token_id)):
            return torch.ones_like(prompt, dtype=torch.bool)
        mask: Tensor = prompt != pads[0]
        return mask


def token_numbers(ids: Any) -> list[int]:
    """Token ids as transformers gives them: none, a single id, several, or a tensor."""
    numbers: list[int] = [] if ids is None else torch.as_tensor(ids).flatten().tolist()
    return numbers


def end_at_turns(model: Any, tokenizer: Any) -> None:
    """Have a model's texts end where its chat template ends a turn too, as answers are trained to.

    A template that fails changes nothing: it says so when it is used.
    """
    ends = token_numbers(model.generation_config.eos_token_id)
    with suppress(PromptError):
        end = end_of_turn(tokenizer)
        if end is not None and end not in ends:
            model.generation_config.eos_token_id = [*ends, end]


def _check(config: GenerationConfig, rest: dict[str, Any]) -> None:
    """Refuse options that routing gives no meaning, or that there are not.

    Raises:
        PolicyError: There is one.
    """
    for name, why in _REFUSED.items():
        value = rest.get(name, getattr(config, name, None))
        if value is None or (value is False and name != "use_cache"):
            continue
        is_plain = isinstance(value, bool | int | float | str)
        if not (is_plain and value == _HARMLESS.get(name)):
            shown = f"={value!r}" if is_plain else ""
            raise PolicyError(f"generate takes no {name}{shown}: {why}")
    if isinstance(rest.get("custom_generate"), str):
        raise PolicyError(f"generate takes no custom_generate by name: {_CODE}; pass a function")
    misplaced = sorted(OWN & vars(config).keys())
    if misplaced:
        raise PolicyError(
            f"a generation config has no {', '.join(misplaced)}: pass it to generate itself"
        )
    unknown = sorted(name for name, value in rest.items() if value is not None)
    unknown = [name for name in unknown if name not in _TAKEN]
    if unknown:
        raise PolicyError(
            f"generate takes no {', '.join(unknown)}: expected options of Buddy "
            f"({', '.join(sorted(OWN))}) or of transformers' generate"
        )
