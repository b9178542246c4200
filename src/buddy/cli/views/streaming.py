"""Keeps the new token ids of a generation, and passes them on to be printed."""

from typing import Any

from transformers.generation.streamers import BaseStreamer


class Collector(BaseStreamer):
    """A streamer that remembers the new tokens; the first call is the prompt."""

    def __init__(self, then: Any | None) -> None:
        self.token_ids: list[int] = []
        self._then = then
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Called by transformers with the prompt, then with each token."""
        if not self._is_prompt:
            self.token_ids += value.flatten().tolist()
        self._is_prompt = False
        if self._then is not None:
            self._then.put(value)

    def end(self) -> None:
        """Called by transformers when there is no more."""
        if self._then is not None:
            self._then.end()
