"""ChatSession: a loaded model that answers messages, streaming, and says what it ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rich.console import Console

from buddy.cli.options import parse_reroute
from buddy.cli.views.display import fetch_progress
from buddy.errors import PromptError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen, and when to stop."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int

    def options(self) -> dict[str, Any]:
        """As transformers' `generate` takes them."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if self.temperature == 0:
            return {**options, "do_sample": False}
        return {
            **options,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer.

    Attributes:
        text: Without special tokens.
        token_texts: Each new token alone, special ones included.
        prompt_tokens: How many tokens the prompt had.
        trace: A `DepthTrace`.
        interrupted: Whether Ctrl-C ended it.
    """

    text: str
    token_texts: list[str]
    prompt_tokens: int
    trace: Any
    interrupted: bool


class ChatSession:
    """A model, its tokenizer, and the routing options of one command.

    Args:
        model: Preset, hub id, folder, GGUF file or Buddy checkpoint.
        policy: In place of the model's own.
        kv_policy: In place of the model's own.
        reroute: As typed.
        engine: Who decodes.
        quant: Weights in fewer bits.
        console: Where progress is shown.
    """

    def __init__(
        self,
        model: str,
        *,
        policy: str | None,
        kv_policy: str | None,
        reroute: str,
        engine: str,
        quant: str | None,
        console: Console,
    ) -> None:
        from buddy.engine.run import check_reroute
        from buddy.hub.loading import load_tokenizer
        from buddy.model import BuddyForCausalLM

        self.reroute = check_reroute(cast(Any, parse_reroute(reroute)))
        self._console = console
        with fetch_progress(console) as on_progress:
            self.model = BuddyForCausalLM.from_pretrained(
                model,
                policy=policy,
                kv_policy=kv_policy,
                merge_adapter=True,
                engine=engine,
                quant=quant,
                on_progress=on_progress,
            )
        self.tokenizer = load_tokenizer(model)

    @property
    def policy(self) -> str:
        """Who chooses the blocks, in a few words."""
        untrained = "" if self.model.router is not None else ", no trained router"
        return self.model.policy.describe() + untrained

    def check_budget(self, budget: str | None, prefill_budget: str | None = None) -> int | None:
        """Blocks that a budget allows, None if each prompt decides; refuses what cannot be."""
        self.model.read_sources(budget, prefill_budget, 1)
        return self.model.read_budgets(budget, 1)[0]

    def _prepare(self, budget: str | None, prefill_budget: str | None) -> None:
        """Have the policy measure what it needs of the model, before the answer is timed."""
        from buddy.depth.policy import prepare
        from buddy.generation.budgets import read_prefill_budget

        num_blocks = self.model.num_blocks
        blocks = self.check_budget(budget, prefill_budget)
        depths = [num_blocks if blocks is None else blocks]  # what auto needs is trained
        if prefill_budget is not None:
            depths.append(read_prefill_budget(prefill_budget, num_blocks))
        with fetch_progress(self._console) as on_progress:
            prepare(self.model.policy, depths, on_progress)

    def check_chat(self) -> None:
        """Refuse a conversation where the model knows no form for one.

        Raises:
            PromptError: It has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise PromptError(
                "this model has no chat template, so it takes one message at a time and no system "
                "message: use buddy generate --raw"
            )

    def prompt_ids(self, messages: Sequence[Mapping[str, str]], *, raw: bool) -> Any:
        """Token ids [1, tokens] of a conversation, or of the last message as it stands."""
        if raw or (self.tokenizer.chat_template is None and len(messages) == 1):
            return self.tokenizer(messages[-1]["content"], return_tensors="pt").input_ids
        self.check_chat()
        return self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]

    def answer(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        budget: str | None,
        sampling: Sampling,
        prefill_budget: str | None = None,
        raw: bool = False,
        stream: bool = True,
    ) -> Answer:
        """Generate one answer, streaming its text to stdout unless told otherwise.

        Raises:
            BudgetError: The budget cannot be read or spent.
            PromptError: The prompt is empty, or longer than the context.
        """
        import torch
        from transformers.generation.streamers import TextStreamer

        from buddy.cli.views.streaming import Collector
        from buddy.generation.trace import DepthTrace

        content = messages[-1]["content"]
        if not content.isprintable() and any("\ud800" <= c <= "\udfff" for c in content):
            raise PromptError("the prompt is no UTF-8 text")
        if not content.strip():
            raise PromptError("the prompt is empty: write what the model is to answer")
        self._prepare(budget, prefill_budget)
        ids = self.prompt_ids(messages, raw=raw).to(self.model.device)
        trace = DepthTrace()
        text = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        collector = Collector(text if stream else None)
        torch.manual_seed(sampling.seed)
        interrupted = False
        try:
            self.model.generate(
                ids,
                budget=budget,
                prefill_budget=prefill_budget,
                reroute=self.reroute,
                streamer=collector,
                trace=trace,
                **sampling.options(),
            )
        except KeyboardInterrupt:
            collector.end()
            interrupted = True
        tokens = collector.token_ids
        return Answer(
            self.tokenizer.decode(tokens, skip_special_tokens=True),
            [self.tokenizer.decode([token]) for token in tokens],
            ids.shape[1],
            trace,
            interrupted,
        )
