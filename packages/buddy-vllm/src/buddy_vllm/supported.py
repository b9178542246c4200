"""What of vLLM the plugin serves; the rest is refused at start, with what to set."""

from collections.abc import Iterator
from typing import Any

from buddy_vllm.errors import UnsupportedError


def check(vllm_config: Any, uses_rust_frontend: bool) -> None:
    """Refuse a configuration that the plugin does not serve.

    Args:
        vllm_config: vLLM's own.
        uses_rust_frontend: Whether VLLM_USE_RUST_FRONTEND is set.

    Raises:
        UnsupportedError: There is something in it that is not served; all of it is named.
    """
    found = list(refusals(vllm_config, uses_rust_frontend))
    if found:
        raise UnsupportedError(f"buddy-vllm cannot serve this: {'; '.join(found)}")


def refusals(config: Any, uses_rust_frontend: bool) -> Iterator[str]:
    """Each thing that is not served, and what to set."""
    model, parallel = config.model_config, config.parallel_config
    if uses_rust_frontend:
        yield "budgets are read by the Python front end: unset VLLM_USE_RUST_FRONTEND"
    if not model.enforce_eager:
        yield "compiled passes and CUDA graphs run all blocks: set --enforce-eager"
    if model.runner_type != "generate":
        yield "only generation has a depth: leave --runner out"
    if config.speculative_config is not None:
        yield "drafts know no plan: leave --speculative-config out"
    if config.kv_transfer_config is not None:
        yield "keys and values of one plan must not reach another: leave --kv-transfer-config out"
    if getattr(config, "ec_transfer_config", None) is not None:
        yield "embeddings come from no other engine: leave --ec-transfer-config out"
    if config.lora_config is not None:
        yield "adapters are merged by buddy export: leave --enable-lora out"
    if parallel.data_parallel_size > 1:
        yield "data parallel ranks are not tested: run replicas in place of --data-parallel-size"
    if parallel.decode_context_parallel_size > 1 or _context_parallel(parallel) > 1:
        yield "a context on several ranks is not tested: leave context parallelism out"
    if parallel.use_ubatching:
        yield "two half batches know no plan: leave --enable-dbo and --ubatch-size out"
    if config.cache_config.kv_sharing_fast_prefill:
        yield "a prefill must run whole: leave --kv-sharing-fast-prefill out"


def _context_parallel(parallel: Any) -> int:
    return int(getattr(parallel, "prefill_context_parallel_size", 1))
