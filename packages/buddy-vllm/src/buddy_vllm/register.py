"""The entry point: vLLM calls `register` in each of its processes before anything else."""

from typing import Any

from buddy_vllm import adapter, supported


def register() -> None:
    """Tell vLLM of the routed models, and have requests planned; harmless if called again.

    In a vLLM of another minor version it logs a line and does nothing: vLLM would serve no model at
    all if it raised.
    """
    if not adapter.is_written_for():
        return
    from buddy_vllm import frontend, runner_v1

    adapter.register_models(_check)
    adapter.watch_attention()
    frontend.install()
    runner_v1.install()


def _check(vllm_config: Any) -> None:
    supported.check(vllm_config, adapter.uses_rust_frontend())
