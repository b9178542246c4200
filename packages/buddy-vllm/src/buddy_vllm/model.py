"""The routed Llama and Qwen2: vLLM's own layers, each run by the requests that are to run it."""

from typing import Any

import torch

from buddy_vllm import adapter
from buddy_vllm.batch import Batch
from buddy_vllm.blocks import run_blocks


class Routed:
    """What a causal LM of vLLM does under plans; a base beside the family's own class.

    Its `model` must have vLLM's Llama layout: `layers`, `start_layer`, `end_layer`, `norm`, and
    layers that take and return a residual beside what is still to be added to it.
    """

    model: Any
    takes_plans = True

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        buddy: Batch | None = None,
    ) -> Any:
        """Hidden states [tokens, hidden], or what the next pipeline stage is handed.

        Args:
            input_ids: [tokens], on the first stage.
            positions: [tokens].
            intermediate_tensors: Of the stage before.
            inputs_embeds: [tokens, hidden], in place of ids.
            buddy: Who runs what; None = full depth, as in a dummy run.
        """
        stack = self.model
        if buddy is None or buddy.is_whole:  # vLLM's own way through the blocks
            made = stack(input_ids, positions, intermediate_tensors, inputs_embeds)
            if buddy is not None:
                buddy.count(slice(stack.start_layer, stack.end_layer))
            return made
        is_first, is_last = adapter.pipeline_stage()
        residual: torch.Tensor | None = None
        if is_first:
            hidden = stack.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        else:
            hidden, residual = (
                intermediate_tensors["hidden_states"],
                intermediate_tensors["residual"],
            )
        hidden, residual = run_blocks(stack, positions, hidden, residual, buddy)
        if not is_last:
            return adapter.hand_on(hidden, residual)
        hidden, _ = stack.norm(hidden, residual)
        return hidden

    @classmethod
    def get_model_state_cls(cls) -> Any:
        """How plans reach the model on V2's runner."""
        from buddy_vllm.state_v2 import routed_state

        return routed_state(adapter.default_model_state())


class RoutedLlama(Routed, adapter.llama()):  # type: ignore[misc]
    """vLLM's Llama under plans."""


class RoutedQwen2(Routed, adapter.qwen2()):  # type: ignore[misc]
    """vLLM's Qwen2 under plans."""
