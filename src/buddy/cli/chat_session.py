"""ChatSession: a loaded model that answers messages, streaming, and says what it ran."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from rich.console import Console

from buddy.budget.request import BudgetRequest
from buddy.budget.resolved import Phase, ResolvedBudget
from buddy.cli.loading import load_to_run
from buddy.cli.options import BudgetOptions, RoutingOptions, SamplingOptions, parse_reroute
from buddy.cli.template_option import check_template
from buddy.cli.views.display import fetch_progress, prepare_engine, show_summary
from buddy.errors import PromptError

_USUAL_WISHES: Final = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
        *("do_sample", "temperature", "top_p", "max_length", "max_new_tokens", "num_beams"),
        *("num_return_sequences", "use_cache", "_from_model_config"),
    }
)
"""What generation_config.json may ask for: checked or left out when it is read, or overridden
here."""

if TYPE_CHECKING:
    from buddy.inference import InferenceModel


def check_message(role: str, content: str) -> None:
    """Refuse a message that no model can answer.

    Raises:
        PromptError: It is empty, or no text.
    """
    what = "prompt" if role == "user" else f"{role} message"
    if not content.isprintable() and any("\ud800" <= c <= "\udfff" for c in content):
        raise PromptError(f"the {what} is no UTF-8 text")
    if role == "user" and not content.strip():
        raise PromptError("the prompt is empty: write what the model is to answer")


def check_budget(model: "InferenceModel", budget: BudgetRequest) -> ResolvedBudget:
    """A budget in blocks of a model.

    Raises:
        BudgetError: The model or its policy cannot spend it.
    """
    resolved = budget.resolve(model.limits)
    model.policy.check_spendable(resolved.depths())
    return resolved


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer.

    Attributes:
        text: Without special tokens.
        token_texts: Each new token alone, special ones included.
        prompt_tokens: How many tokens the prompt had.
        trace: A `DepthTrace`.
        phases: Of each step; that of a token is the one of the token before it, which made it.
        interrupted: Whether Ctrl-C ended it.
    """

    text: str
    token_texts: list[str]
    prompt_tokens: int
    trace: Any
    phases: tuple[Phase, ...]
    interrupted: bool


class ChatSession:
    """A model, its tokenizer, and the routing options of one command.

    Args:
        model: Preset, hub id, folder, GGUF file or Buddy checkpoint.
        routing: Who chooses the blocks, how often, and what executes them.
        budgets: Checked before the weights are fetched, as far as the config can tell.
        console: Where progress is shown.
        variables: Of the model's chat template; checked then, too.
    """

    def __init__(
        self,
        model: str,
        routing: RoutingOptions,
        budgets: BudgetOptions,
        console: Console,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        from buddy.checkpoint.resolve import resolve
        from buddy.engine.run import check_reroute
        from buddy.generation.options import end_at_turns

        self.console, self._is_engine_ready = console, False
        self.reroute = check_reroute(parse_reroute(routing.reroute))
        self.drafts, self._variables = routing.drafts, variables
        resolved = resolve(model)

        def check(outline: "InferenceModel") -> None:
            check_budget(outline, budgets.request)
            if variables:
                check_template(resolved.load_tokenizer(), variables)

        self.model = load_to_run(
            resolved,
            check,
            console,
            routing,
            needs_all=self._needs_generate,
        )
        self.tokenizer = resolved.load_tokenizer()
        end_at_turns(self.model, self.tokenizer)

    @property
    def policy(self) -> str:
        """Who chooses the blocks, in a few words."""
        untrained = "" if self.model.router is not None else ", no trained router"
        return self.model.policy.describe() + untrained

    def prepare_engine(self) -> None:
        """Have ready what decodes, once.

        Raises:
            ModelError: The engine that was asked for cannot be had.
        """
        if not self._is_engine_ready:
            prepare_engine(self.console, self.model.executor)
            self._is_engine_ready = True

    def check_budget(self, budget: BudgetRequest) -> ResolvedBudget:
        """A budget in blocks of the model; refuses what cannot be."""
        return check_budget(self.model, budget)

    def _prepare_policy(self, budget: BudgetRequest) -> ResolvedBudget:
        """The budget, once the policy has measured what it needs of the model for it."""
        resolved = self.check_budget(budget)
        depths = [resolved.blocks or self.model.num_blocks]  # what auto needs is trained
        depths += [each for each in (resolved.prefill, resolved.think) if each is not None]
        with fetch_progress(self.console) as on_progress:
            self.model.policy.prepare_for(depths, on_progress)
        return resolved

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
        import torch

        from buddy.data.tokens import encode

        if raw or (self.tokenizer.chat_template is None and len(messages) == 1):
            return torch.tensor([encode(self.tokenizer, messages[-1]["content"])]).long()
        self.check_chat()
        from buddy.data.chat import apply_chat

        options: dict[str, Any] = {"return_tensors": "pt", "return_dict": True}
        return apply_chat(self.tokenizer, messages, **options, **self._variables)["input_ids"]

    def answer(
        self,
        messages: Sequence[Mapping[str, str]],
        budgets: BudgetOptions,
        sampling: SamplingOptions,
        *,
        raw: bool = False,
        stream: bool = True,
    ) -> Answer:
        """Generate one answer, streaming its text to stdout unless told otherwise.

        Raises:
            BudgetError: The budget cannot be read or spent.
            CheckpointError: What the model's makers say of generation cannot be followed.
            ModelError: The logits are not finite.
            PromptError: The prompt is empty, or longer than the context; or the template fails.
        """
        import torch
        from transformers.generation.streamers import TextStreamer

        from buddy.cli.views.streaming import Collector
        from buddy.generation.trace import DepthTrace

        for message in messages:
            check_message(**message)
        resolved = self._prepare_policy(budgets.request)
        ids = self.prompt_ids(messages, raw=raw).to(self.model.device)
        prompt = ids[0].tolist()
        self._note_closed(prompt, resolved, sampling)
        trace = DepthTrace()
        text = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        collector = Collector(text if stream else None)
        torch.manual_seed(sampling.seed)
        interrupted = False
        try:
            self.prepare_engine()
            # The summary says what a warning of it would.
            with _no_warnings(), _explained_by_wishes(self.model.generation_config):
                self._write(sampling)(
                    ids,
                    budget=budgets.request,
                    reroute=self.reroute,
                    streamer=collector,
                    trace=trace,
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
            ("prompt", *resolved.phases(prompt, tokens)),
            interrupted,
        )

    def _note_closed(
        self, prompt: list[int], resolved: ResolvedBudget, sampling: SamplingOptions
    ) -> None:
        """Say that no thinking is left to limit, or to spend a budget on."""
        if sampling.thinking_tokens is None and resolved.think is None:
            return  # to look for marks reads the tokenizer once more
        marks = self.model.thinking_marks
        if marks is not None and marks.is_closed(prompt):
            self.console.print(
                "The prompt ends with thinking that is over, so the answer has none: to have it "
                "think, try --template-option enable_thinking=true.",
                style="yellow",
                markup=False,
            )

    def _needs_generate(self, model: "InferenceModel") -> bool:
        from buddy.generation.answer import needs_generate

        return bool(self.drafts) or needs_generate(model.generation_config)

    def _write(self, sampling: SamplingOptions) -> Callable[..., object]:
        """What writes an answer to a prompt: `generate`, where it is needed."""
        from buddy.generation.answer import write_answer

        if self._needs_generate(self.model):
            generate = cast(Any, self.model).generate
            return partial(generate, drafts=self.drafts, **sampling.for_generate())
        return partial(
            write_answer,
            self.model,
            max_new_tokens=sampling.max_new_tokens,
            thinking_tokens=sampling.thinking_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )

    def show_summary(self, answer: Answer, budgets: BudgetOptions) -> None:
        """Say what was asked and run, and how fast, if any token came."""
        if answer.trace.steps:
            predictor = self.model.predictor
            show_summary(
                self.console,
                answer.trace,
                budget=budgets.budget,
                prefill_budget=budgets.prefill_budget,
                constant=None if predictor is None else predictor.constant,
                policy=self.policy,
                kv_policy=self.model.kv_policy,
                engine=self.model.executor.describe(),
            )


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Let generation log errors alone, within."""
    log = logging.getLogger("buddy.generation")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _explained_by_wishes(generation_config: Any) -> AbstractContextManager[None]:
    """Explain a failure by what a foreign generation_config.json asks for, if it asks for more.

    transformers follows most of such a file without a check. Where it asks for nothing special, an
    error is ours and stays as it is.
    """
    import torch

    from buddy.hub.wrap_errors import explained

    wishes = generation_config.to_diff_dict()
    special = sorted(name for name in wishes.keys() - _USUAL_WISHES if wishes[name])
    if not special:
        return nullcontext()
    return explained(
        "the model cannot generate",
        f"its generation_config.json asks for {', '.join(special)}: delete that there",
        (OSError, MemoryError, torch.OutOfMemoryError),  # of whoever reads, and of the machine
    )
