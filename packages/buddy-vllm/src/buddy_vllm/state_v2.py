"""How plans reach the model on vLLM's V2 runner, which GPUs use: by its `ModelState`."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buddy_vllm import adapter
from buddy_vllm.batch import Batch, row_of


@cache
def routed_state(base: Any) -> Any:
    """A `ModelState` that knows each request's plan.

    Args:
        base: vLLM's `DefaultModelState`, or another class with its methods.
    """

    class RoutedState(base):  # type: ignore[misc]
        """Keeps plans from a request's arrival on, and hands each pass those of its requests."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._rows: dict[str, NDArray[np.bool_]] = {}
            self._groups: Any = ()

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            """Read the plan of a new request, or of one that was preempted."""
            super().add_request(req_index, new_req_data)
            params = new_req_data.sampling_params
            extra = None if params is None else params.extra_args
            self._rows[new_req_data.req_id] = row_of(extra, self._num_blocks)

        def remove_request(self, req_id: str) -> None:
            """Forget a request."""
            super().remove_request(req_id)
            self._rows.pop(req_id, None)

        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: Any,
            attn_groups: Any,
            *args: Any,
            **options: Any,
        ) -> Any:
            """The whole batch's metadata; parts of it are made from its groups."""
            self._groups = attn_groups
            return super().prepare_attn(
                input_batch,
                cudagraph_mode,
                block_tables,
                slot_mappings,
                attn_groups,
                *args,
                **options,
            )

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
            """What the model is called with beside tokens and positions: `buddy`."""
            made: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
            # A dummy run has requests that never arrived: full depth.
            rows = [
                self._rows.get(name, np.ones(self._num_blocks, np.bool_))
                for name in input_batch.req_ids
            ]
            attention = adapter.GroupedAttention(self._groups)
            counts = input_batch.num_scheduled_tokens
            return {**made, "buddy": Batch(np.stack(rows), counts, self.device, attention)}

        @property
        def _num_blocks(self) -> int:
            return int(self.model.config.num_hidden_layers)

    return RoutedState
