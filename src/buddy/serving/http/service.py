"""What all routes have in common: the engine, who reads for it, and what is under way."""

import time
from dataclasses import dataclass, field

import anyio

from buddy.serving.client import EngineClient
from buddy.serving.http.budget_rules import BudgetRules
from buddy.serving.http.defaults import Defaults
from buddy.serving.http.mailbox import Answers
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.schema import ModelBody, ModelFacts
from buddy.serving.http.unknown_fields import header_of


@dataclass(kw_only=True, slots=True)
class Service:
    """What the routes need.

    Attributes:
        num_ignored: Fields of requests that were not known and not used.
        under_way: Requests that are being answered.
        reading: Lets one request at a time be read and handed to the engine.
        reading_large: Lets one with a large body at a time wait for that.
    """

    engine: EngineClient
    reader: PromptReader
    rules: BudgetRules
    defaults: Defaults = field(default_factory=Defaults)
    started: int = field(default_factory=lambda: int(time.time()))
    num_ignored: int = 0
    under_way: set[Answers] = field(default_factory=set)
    reading: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    reading_large: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    @property
    def waiting(self) -> int:
        """Requests that wait to be read."""
        return sum(turn.statistics().tasks_waiting for turn in (self.reading, self.reading_large))

    def note_ignored(self, ignored: tuple[str, ...]) -> dict[str, str]:
        """Count fields of a request that were not used; gives the header that names them."""
        self.num_ignored += len(ignored)
        return header_of(ignored)

    def metrics(self) -> bytes:
        """The engine's counters and gauges, and those of what clients send."""
        return (
            self.engine.metrics()
            + (
                "# HELP buddy_ignored_fields_total Fields of requests that are not known.\n"
                "# TYPE buddy_ignored_fields_total counter\n"
                f"buddy_ignored_fields_total {self.num_ignored}\n"
            ).encode()
        )

    def model(self, name: str | None = None) -> ModelBody:
        """The served model, as `/v1/models` lists it, by its own name or that of a request."""
        facts = self.engine.facts
        return ModelBody(
            id=name or facts.model,
            object="model",
            created=self.started,
            owned_by="buddy",
            root=facts.model,
            parent=None,
            max_model_len=facts.context,
            buddy=ModelFacts(
                num_blocks=facts.num_blocks,
                least_blocks=facts.least_blocks,
                context=facts.context,
                has_predictor=facts.has_predictor,
                means=facts.means,
                has_chat=self.reader.has_chat,
                least_ms_per_token=facts.least_ms_per_token,
                engine=facts.engine,
            ),
        )
