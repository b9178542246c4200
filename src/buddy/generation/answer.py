"""One answer, written as `generate` writes it, without transformers' code for generation.

To import that takes longer than to write a short answer. What is used of transformers here is
small: its processors of logits, stopping criteria and generation config.
"""

import copy
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)

from buddy.budget.request import BudgetLike
from buddy.budget.thinking import read_thinking_tokens
from buddy.engine.run import check_reroute
from buddy.engine.state.sequence import Reroute
from buddy.generation.loop import decode_loop
from buddy.generation.next_token import FiniteLogits
from buddy.generation.options import Prepared, token_numbers
from buddy.generation.padded import check_prompts, check_shapes, left_padded
from buddy.generation.thinking import ThinkingProcessor
from buddy.generation.trace import DepthTrace, finish_reasons

_FOLLOWED: Final = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
        *("do_sample", "temperature", "top_p", "top_k", "max_length", "max_new_tokens"),
        *("num_beams", "num_return_sequences", "use_cache", "_from_model_config"),
    }
)
"""What a generation config may ask for: followed here, or said by whoever asks for an answer."""


def needs_generate(config: GenerationConfig) -> bool:
    """Whether a model's makers ask for more than is followed here."""
    wishes = config.to_diff_dict()
    return any(wishes[name] for name in wishes.keys() - _FOLLOWED)


@torch.no_grad()
def write_answer(
    model: Any,
    prompt: Int[Tensor, "one tokens"],
    *,
    budget: BudgetLike | None,
    reroute: Reroute,
    streamer: Any,
    trace: DepthTrace,
    max_new_tokens: int,
    thinking_tokens: int | None,
    temperature: float,
    top_p: float,
) -> Int[Tensor, "one columns"]:
    """Answer one prompt, token by token.

    Args:
        model: An `InferenceModel`, whose generation config does not need `generate`.
        prompt: Token ids.
        budget: As `generate` takes it, and so are the others.
        reroute: The same.
        streamer: The same.
        trace: The same.
        max_new_tokens: The same.
        thinking_tokens: The same.
        temperature: The same; 0 takes the likeliest token.
        top_p: The same.

    Returns:
        The prompt and what was written, as `generate` returns them.

    Raises:
        BudgetError: The budget cannot be read or spent.
        ModelError: The logits are not finite.
        PolicyError: Thinking has a limit, and the model does not think.
        PromptError: No tokens, or more than the context holds.
    """
    config, backbone = copy.deepcopy(model.generation_config), model.backbone
    mask = Prepared(config, None, None).mask_from_pads(prompt)
    check_shapes(prompt, valid=mask, prompt_mask=None, session=None, backbone=backbone)
    wanted = model.read_sources(budget, None, 1)
    check_prompts(prompt, mask, backbone)
    ids, mask = left_padded(prompt.long(), mask.long(), 0)
    sources = model.choose_sources(wanted, ids, mask.bool(), mask.bool())
    columns = ids.shape[1]
    # The token after a full context can still be predicted, but not fed.
    new = min(max_new_tokens, backbone.context - int(mask.sum()) + 1)
    config.do_sample, config.max_length = temperature != 0, columns + new
    ends = token_numbers(config.eos_token_id)
    pads = token_numbers(config.pad_token_id) or ends
    config._eos_token_tensor = torch.tensor(ends, device=ids.device) if ends else None
    config._pad_token_tensor = torch.tensor(pads[0], device=ids.device) if pads else None
    criteria: list[StoppingCriteria] = [MaxLengthCriteria(columns + new)]
    if ends:
        criteria.append(EosTokenCriteria(config._eos_token_tensor))
    processors: list[LogitsProcessor] = [FiniteLogits()]
    if thinking_tokens is not None:
        limit = read_thinking_tokens(thinking_tokens, model.thinking_marks)
        processors.append(ThinkingProcessor(limit, ids))
    if temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(temperature))
    if temperature != 0 and top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if streamer is not None:
        streamer.put(ids.cpu())
    sequences = decode_loop(
        model,
        ids,
        processors,
        criteria,
        config,
        streamer,
        attention_mask=mask,
        budget=sources,
        budget_rows=torch.arange(1, device=ids.device),
        cache=model.new_session(1, min(columns + new, model.config.max_position_embeddings)),
        reroute=check_reroute(reroute),
        batch_route="independent",
        trace=trace,
    )
    sequences[:, :columns] = prompt
    reasons = finish_reasons(sequences, config, is_cut=new < max_new_tokens)
    trace.finish(reasons, backbone.context)
    return sequences
