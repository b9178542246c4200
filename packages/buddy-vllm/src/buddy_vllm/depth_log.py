"""A line about depth in vLLM's log, at the intervals of its own."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from buddy_vllm import adapter
from buddy_vllm.statistics import totals


class DepthLogger(StatLoggerBase):  # type: ignore[misc,unused-ignore]
    """Logs how deep answers ran that have ended since the last line."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._is_ours = adapter.is_ours(vllm_config)

    def record(self, *args: Any, **options: Any) -> None:
        """Nothing is taken from vLLM's own counts."""

    def log_engine_initialized(self) -> None:
        """Nothing to say yet."""

    def log(self) -> None:
        """Write the line, if an answer has ended."""
        line = totals.line() if self._is_ours else None
        if line is not None:
            adapter.logger().info(line)
