"""The entry point: vLLM calls `register` in each of its processes before anything else."""

from typing import Any

from buddy_vllm import adapter, supported


def register() -> None:
    """Tell vLLM of the routed models, and have requests planned; harmless if called again.

    Raises:
        UnsupportedError: vLLM is of another minor version.
    """
    adapter.check_version()
    from buddy_vllm import frontend, runner_v1

    adapter.register_models(_check)
    adapter.record_metadata()
    frontend.install()
    runner_v1.install()


def _check(vllm_config: Any) -> None:
    supported.check(vllm_config, adapter.uses_rust_frontend())
