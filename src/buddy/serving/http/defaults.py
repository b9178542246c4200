"""What the model's makers say of requests that leave it open, as `generate` follows it."""

from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from buddy.errors import ServingError, shown
from buddy.generation.drafts import Drafts
from buddy.serving.http.bodies import RequestFields
from buddy.serving.request import Sampling

_SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FIELDS: Final = {"max_new_tokens": "max_tokens", "max_length": "max_tokens"}
"""Fields of requests that have the ranges of others."""
_OTHERS: Final = frozenset(
    {
        *("do_sample", "max_length", "max_new_tokens"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
        # Of beams, as answers stream and have none; of drafts; of what is returned beside tokens.
        *("num_beams", "num_beam_groups", "num_return_sequences", "early_stopping"),
        *("length_penalty", "diversity_penalty", "is_assistant", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("max_matching_ngram_size", "speculation_type", "output_scores", "output_logits"),
        *("output_attentions", "output_hidden_states", "return_dict_in_generate"),
        *("use_cache", "cache_implementation", "max_cache_len", "disable_compile"),
    }
)
"""Names of a generation config that are followed, or mean nothing to a server."""
_NEUTRAL: Final = {"guidance_scale": 1, "min_new_tokens": 0}
"""Values that ask for nothing, beside transformers' own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a request has that names none of it."""

    sampling: Sampling = field(default_factory=Sampling)
    drafts: Drafts = field(default_factory=Drafts)
    max_new_tokens: int | None = None
    max_length: int | None = None
    """Tokens of prompt and answer together, where nothing is said of the answer alone."""

    @classmethod
    def read(cls, config: Any, drafts: Drafts | None = None) -> "Defaults":
        """The wishes of a transformers' `GenerationConfig`.

        Args:
            config: The model's.
            drafts: What whoever started the server has named.

        Raises:
            ServingError: It asks for what this server does not do.
        """
        wishes = {name: value for name, value in vars(config).items() if value is not None}
        neutral = config._get_default_generation_params() | _NEUTRAL
        for name, value in wishes.items():
            if name.startswith("_") or name in _OTHERS or name in _SAMPLED:
                continue
            if name not in neutral or value != neutral[name]:
                raise ServingError(
                    f"the model's generation_config asks for {name}={shown(value)}, which buddy "
                    "serve does not do: delete it there"
                )
        lengths = ("max_new_tokens", "max_length")
        for name in (*_SAMPLED, *lengths):
            try:
                RequestFields(**{_FIELDS.get(name, name): wishes.get(name)})
            except ValidationError as error:
                raise ServingError(
                    f"the model's generation_config asks for {name}={shown(wishes[name])}, which "
                    f"cannot be: {error.errors()[0]['msg']}; correct it there"
                ) from error
        named = {name: wishes[name] for name in _SAMPLED if name in wishes}
        if wishes.get("do_sample") is False:
            named["temperature"] = 0.0
        if "top_k" in named:
            named["top_k"] = max(0, named["top_k"])
        sampling = Sampling(**named)
        return cls(
            sampling=sampling,
            drafts=drafts or Drafts(),
            **{name: wishes.get(name) for name in lengths},
        )

    def most_tokens(self, prompt_tokens: int, usual: int) -> int:
        """Tokens of an answer to a prompt, of which a server that is told nothing makes so many."""
        if self.max_new_tokens is not None:
            return min(usual, self.max_new_tokens)
        if self.max_length is not None:
            return max(1, min(usual, self.max_length - prompt_tokens))
        return usual
