"""Every place where the plugin reaches into vLLM. It is written against one minor version.

vLLM's modules are imported inside of functions: this file is imported before vLLM is ready.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from buddy_vllm.batch import Batch, Group
from buddy_vllm.errors import UnsupportedError

MINOR: Final = "0.32"
"""The minor version of vLLM that this is written for."""
ARCHITECTURES: Final = {
    "BuddyLlamaForCausalLM": "buddy_vllm.model:RoutedLlama",
    "BuddyQwen2ForCausalLM": "buddy_vllm.model:RoutedQwen2",
}
"""What `buddy export` writes into config.json, and the class that serves it."""
BACKENDS: Final = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Attention whose metadata of one group of requests leaves that of another alone. FlashInfer plans
its one wrapper anew at each call, so a batch of several plans would be answered wrongly."""
_PATCHED: Final = "__buddy__"


def is_written_for(found: str | None = None) -> bool:
    """Whether the plugin knows this minor version of vLLM; a warning in the log if not.

    Args:
        found: Its version; None = the one that is installed.
    """
    if found is None:
        import vllm

        found = vllm.__version__
    if found.split(".")[:2] == MINOR.split("."):
        return True
    logger().warning(
        "buddy-vllm is written for vLLM %s, and this is %s: it does nothing here, and what buddy "
        "export has made cannot be served; install vllm==%s.* or the version of buddy-vllm that "
        "goes with yours",
        *(MINOR, found, MINOR),
    )
    return False


def logger() -> logging.Logger:
    """A logger that vLLM's own settings reach."""
    return logging.getLogger("vllm.buddy")


def invalid(message: str, parameter: str) -> Exception:
    """What to raise in the front end, so that a request is answered by HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    made: Exception = VLLMValidationError(message, parameter=parameter)
    return made


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a wrapped method in a method's place, once in a process."""
    original = getattr(owner, name)
    if hasattr(original, _PATCHED):
        return
    wrapped = make(original)
    wrapped.__wrapped__ = original
    setattr(wrapped, _PATCHED, True)
    setattr(owner, name, wrapped)


# Start-up


def register_models(check: Callable[[Any], None]) -> None:
    """Tell vLLM of the classes, and have it ask `check` about each configuration of theirs."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    class CheckedConfig(VerifyAndUpdateConfig):  # type: ignore[misc,unused-ignore]
        """Looks at the whole configuration once it is made, in whatever process makes it."""

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            check(vllm_config)

    for name, where in ARCHITECTURES.items():
        ModelRegistry.register_model(name, where)
        MODELS_CONFIG_MAP[name] = CheckedConfig


def is_ours(vllm_config: Any) -> bool:
    """Whether an engine serves an exported model by the plugin's class."""
    return getattr(vllm_config.model_config, "architecture", None) in ARCHITECTURES


def model_folder(vllm_config: Any) -> Path:
    """Where the served model lies."""
    return Path(vllm_config.model_config.model)


def uses_rust_frontend() -> bool:
    """Whether requests would reach the engine past Python's front end."""
    from vllm import envs

    return bool(envs.VLLM_USE_RUST_FRONTEND)


# Front end


def wrap_front_end(
    begin: Callable[[Any], Any],
    admit: Callable[[Any, Any, bool], Any],
) -> None:
    """Have every request pass `admit` in the front end.

    Args:
        begin: Given the engine's configuration, returns what plans its requests; None for a model
            that is not ours.
        admit: Given that, the request that vLLM has made, and whether more of its prompt is to
            come; returns the request that goes on to the engine, or raises `invalid`.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    def with_start(original: Any) -> Any:
        def __init__(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
            self._buddy = begin(vllm_config)
            original(self, vllm_config, *args, **options)

        return __init__

    def with_admission(original: Any) -> Any:
        def process_inputs(self: Any, *args: Any, **options: Any) -> Any:
            request = original(self, *args, **options)
            if self._buddy is None:
                return request
            return admit(self._buddy, request, bool(options.get("resumable")))

        return process_inputs

    _replace(InputProcessor, "__init__", with_start)
    _replace(InputProcessor, "process_inputs", with_admission)


def wrap_beam_search(check: Callable[[Any], None]) -> None:
    """Have each HTTP request for a beam search pass `check`, which may raise `invalid`.

    A beam's steps are requests that vLLM makes itself, and what came with the first is not in them.

    Args:
        check: Given the request's `vllm_xargs`.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    def with_check(original: Any) -> Any:
        def to_beam_search_params(self: Any, *args: Any, **options: Any) -> Any:
            check(self.vllm_xargs)
            return original(self, *args, **options)

        return to_beam_search_params

    for kind in (ChatCompletionRequest, CompletionRequest):
        _replace(kind, "to_beam_search_params", with_check)


def with_plan(request: Any, extra: dict[str, Any], salt: str) -> Any:
    """The request with something more in its `extra_args`, and another salt of its cache.

    The caller's own parameters stay as they are: prompts may share them.
    """
    params = copy.copy(request.sampling_params)
    params.extra_args = {**(params.extra_args or {}), **extra}
    request.sampling_params = params
    request.cache_salt = salt
    return request


def wrap_outputs(begin: Callable[[Any, Any], Any], end: Callable[[Any, int, Any], None]) -> None:
    """Have each answer's end told, with the tokens that the engine computed for it.

    Args:
        begin: Given a request as it goes to the engine, and what it returned for an earlier
            answer to the same prompt or None; returns what is kept until the answer ends, or None.
        end: Given that, the tokens that were fed, and the output or None. Tokens that were found
            in the prefix cache were not fed; nor was the last one that was generated.
    """
    from vllm.v1.engine.output_processor import RequestState

    def with_note(original: Any) -> Any:
        def from_new_request(cls: Any, *args: Any, **options: Any) -> Any:
            state = original.__func__(cls, *args, **options)
            parent = state.parent_req
            request = options["request"] if "request" in options else args[1]
            state._buddy = begin(request, getattr(parent, "_buddy", None))
            if parent is not None:
                parent._buddy = state._buddy
            return state

        return from_new_request

    def with_end(original: Any) -> Any:
        def make_request_output(
            self: Any, new_token_ids: Any, pooling_output: Any, finish_reason: Any, *rest: Any,
            **options: Any,
        ) -> Any:  # fmt: skip
            made = original(self, new_token_ids, pooling_output, finish_reason, *rest, **options)
            account = getattr(self, "_buddy", None)
            if account is not None and finish_reason is not None and self.detokenizer is not None:
                self._buddy = None
                new = self.detokenizer.num_output_tokens()
                fed = self.prompt_len - self.num_cached_tokens + new - 1 if new else 0
                end(account, fed, made)
            return made

        return make_request_output

    if not hasattr(RequestState.from_new_request, _PATCHED):
        wrapped = with_note(RequestState.from_new_request)
        setattr(wrapped, _PATCHED, True)
        RequestState.from_new_request = classmethod(wrapped)
    _replace(RequestState, "make_request_output", with_end)


# Worker


def check_backend(name: str) -> None:
    """Refuse attention that is none of `BACKENDS`.

    Args:
        name: As vLLM calls it.

    Raises:
        UnsupportedError: It is another.
    """
    if name not in BACKENDS:
        raise UnsupportedError(
            f"buddy-vllm does not know whether attention by {name} can serve several plans at "
            f"once: set --attention-backend to one of {', '.join(BACKENDS)}"
        )


def watch_attention() -> None:
    """Have each attention group keep what its metadata was last made of; see `check_backend`."""
    from vllm.v1.worker.utils import AttentionGroup

    def with_check(original: Any) -> Any:
        def create_metadata_builders(
            self: Any, vllm_config: Any, *args: Any, **options: Any
        ) -> Any:
            if is_ours(vllm_config):
                check_backend(self.backend.get_name())
            return original(self, vllm_config, *args, **options)

        return create_metadata_builders

    def with_memory(original: Any) -> Any:
        def build_metadata(self: Any, common: Any, *args: Any, **options: Any) -> Any:
            self._buddy_common = common
            return original(self, common, *args, **options)

        return build_metadata

    _replace(AttentionGroup, "create_metadata_builders", with_check)
    _replace(AttentionGroup, "build_metadata", with_memory)


class GroupedAttention:
    """Metadata for some requests, made by the backend's own builder.

    Args:
        groups: vLLM's attention groups, by KV cache group.
    """

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        flat = [group for row in groups for group in row]
        self._group_of = {layer: group for group in flat for layer in group.layer_names}

    def only(self, layer: Any, group: Group) -> AbstractContextManager[None]:
        """While it is open, a layer attends for these requests alone."""
        name = layer.self_attn.attn.layer_name
        made_by = self._group_of[name]
        # Layers of one attention group share metadata.
        if id(made_by) not in group.kept:
            common = narrow_common(made_by._buddy_common, group.requests, group.tokens)
            metadata = made_by.build_metadata.__wrapped__(made_by, common)
            group.kept[id(made_by)] = metadata, common.slot_mapping
        return _attending(name, *group.kept[id(made_by)])


def narrow_common(common: Any, requests: NDArray[np.int64], tokens: torch.Tensor) -> Any:
    """The `CommonAttentionMetadata` of some requests of a batch.

    Args:
        common: Of the whole batch.
        requests: Places of the requests, ascending.
        tokens: Places of their tokens, on the device.
    """
    device = common.seq_lens.device
    on_host = torch.from_numpy(requests)
    on_device = on_host.to(device)
    counts = np.diff(common.query_start_loc_cpu.numpy())[requests]
    starts = torch.zeros(len(requests) + 1, dtype=common.query_start_loc_cpu.dtype)
    starts[1:] = torch.from_numpy(np.cumsum(counts))

    def of_host(values: Any) -> Any:
        return None if values is None else values[on_host]

    upper = of_host(common.seq_lens_cpu_upper_bound)
    return dataclasses.replace(
        common,
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[on_device],
        seq_lens_cpu_upper_bound=upper,
        num_reqs=len(requests),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(counts.max()),
        max_seq_len=common.max_seq_len if upper is None else int(upper.max()),
        block_table_tensor=common.block_table_tensor[on_device],
        slot_mapping=common.slot_mapping[tokens],
        positions=None if common.positions is None else common.positions[tokens],
        is_prefilling=of_host(common.is_prefilling),
        req_idx=None if common.req_idx is None else common.req_idx[requests],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


@contextmanager
def _attending(layer: str, metadata: Any, slots: torch.Tensor) -> Iterator[None]:
    """Have a layer attend with other metadata and slots while the block is left open."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    before = context.attn_metadata[layer], context.slot_mapping.get(layer)
    context.attn_metadata[layer] = metadata
    if before[1] is not None:
        context.slot_mapping[layer] = slots
    try:
        yield
    finally:
        context.attn_metadata[layer] = before[0]
        if before[1] is not None:
            context.slot_mapping[layer] = before[1]


def wrap_v1_runner(batch_of: Callable[[Any], Batch | None], ran: Callable[..., None]) -> None:
    """Have V1's model runner hand each pass of a routed model its batch.

    Args:
        batch_of: Given the runner, the requests of the pass; None for a model that is not ours.
        ran: Given the runner and the batch once it has run.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def with_batch(original: Any) -> Any:
        def _model_forward(self: Any, *args: Any, **options: Any) -> Any:
            batch = batch_of(self)
            if batch is None:
                return original(self, *args, **options)
            made = original(self, *args, **options, buddy=batch)
            ran(self, batch)
            return made

        return _model_forward

    def with_buffers(original: Any) -> Any:
        def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **options: Any) -> Any:
            # A dummy run makes them, and on a CPU it is left out where the cache has a given size.
            if self.intermediate_tensors is None:
                self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                    batch_size=self.max_num_tokens, dtype=self.dtype, device=self.device
                )
            return original(self, *args, **options)

        return sync_and_gather_intermediate_tensors

    _replace(GPUModelRunner, "_model_forward", with_batch)
    _replace(GPUModelRunner, "sync_and_gather_intermediate_tensors", with_buffers)


def v1_requests(runner: Any) -> tuple[list[str], list[Any], NDArray[np.int64]]:
    """The requests of V1's coming pass: ids, what the runner keeps of each, and new tokens."""
    ids = list(runner.input_batch.req_ids)
    starts = runner.query_start_loc.np[: len(ids) + 1]
    return ids, [runner.requests[name] for name in ids], np.diff(starts).astype(np.int64)


def default_model_state() -> Any:
    """V2's class that keeps what a model needs of its requests."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    return DefaultModelState


def llama() -> Any:
    """Llama as vLLM has it."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    return LlamaForCausalLM


def qwen2() -> Any:
    """Qwen2 as vLLM has it."""
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    return Qwen2ForCausalLM


def pipeline_stage() -> tuple[bool, bool]:
    """Whether this rank has the first blocks, and whether it has the last ones."""
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    return group.is_first_rank, group.is_last_rank


def hand_on(hidden: torch.Tensor, residual: torch.Tensor) -> Any:
    """What a pipeline stage gives to the next."""
    from vllm.sequence import IntermediateTensors

    return IntermediateTensors({"hidden_states": hidden, "residual": residual})
