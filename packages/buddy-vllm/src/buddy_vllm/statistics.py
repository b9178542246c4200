"""How deep requests ran: each one's own account, and counters for Prometheus and the log."""

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter

BLOCKS = Counter("buddy_blocks", "Transformer blocks that ran, summed over tokens.")
TOKENS = Counter("buddy_tokens", "Tokens that the engine computed.")
REQUESTS = Counter("buddy_requests", "Answers that ended, by blocks of their plan.", ["blocks"])


@dataclass(slots=True)
class Account:
    """What the answers to one prompt run.

    Attributes:
        blocks: Blocks that each token runs.
        num_blocks: Blocks of the model.
        open: Answers that have not ended.
        tokens: Tokens that were computed. Those found in the prefix cache were not, nor was the
            last one of an answer; what a preemption has computed again is not counted again.
    """

    blocks: int
    num_blocks: int
    open: int = 0
    tokens: int = 0

    @property
    def executed(self) -> int:
        """Blocks times tokens that ran."""
        return self.blocks * self.tokens

    def report(self) -> dict[str, Any]:
        """What an output says of it."""
        return report([self])


def report(accounts: Sequence[Account]) -> dict[str, Any]:
    """What the usage block of an answer says.

    Args:
        accounts: Of the prompts of one HTTP request, at least one.
    """
    blocks = [account.blocks for account in accounts]
    made: dict[str, Any] = {
        "blocks": blocks[0] if len(set(blocks)) == 1 else blocks,
        "num_blocks": accounts[0].num_blocks,
    }
    if not any(account.open for account in accounts):
        made["blocks_executed"] = sum(account.executed for account in accounts)
    return made


asked: ContextVar[list[Account] | None] = ContextVar("buddy_accounts", default=None)
"""Where an HTTP request collects the accounts of its prompts; `endpoint` sets it."""


@dataclass
class Totals:
    """Sums since they were last taken; answers end in one thread and are logged in another."""

    answers: int = 0
    tokens: int = 0
    blocks: int = 0
    num_blocks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, account: Account, tokens: int) -> None:
        """Count an answer that has ended."""
        executed = account.blocks * tokens
        with self._lock:
            self.answers += 1
            self.tokens += tokens
            self.blocks += executed
            self.num_blocks = account.num_blocks
        BLOCKS.inc(executed)
        TOKENS.inc(tokens)
        REQUESTS.labels(str(account.blocks)).inc()

    def line(self) -> str | None:
        """One line about the answers since the last; None where none has ended."""
        with self._lock:
            if not self.answers:
                return None
            mean = self.blocks / max(1, self.tokens)
            said = (
                f"Buddy: {self.answers} answers ended, {mean:.4g} of {self.num_blocks} blocks "
                f"per token over {self.tokens} tokens"
            )
            self.answers = self.tokens = self.blocks = 0
        return said


totals = Totals()
