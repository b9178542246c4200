"""Buddy as a model of lm-evaluation-harness: behind `buddy eval tasks` and the launcher."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from buddy.budget.thinking import read_thinking_tokens
from buddy.checkpoint.resolve import load_tokenizer
from buddy.errors import BudgetError, DataError, PolicyError
from buddy.generation.trace import DepthTrace
from buddy.lab.evaluation.conditions import Condition, plan_conditions
from buddy.lab.evaluation.phases import PhaseCounts, count_phases
from buddy.lab.evaluation.samples import SampleLog, measure_missing
from buddy.lab.evaluation.tasks.scoring import Question, Scored, ask, ask_leaking, score
from buddy.lab.evaluation.tasks.settings import Routing, batch_of, followed, number_format
from buddy.model import BuddyForCausalLM

_Encoded = tuple[tuple[str, str] | None, list[int], list[int]]
"""What lm-eval encodes a request as: its texts, the context's tokens, the answer's tokens."""


@dataclass(frozen=True, slots=True)
class _Document:
    """Requests that share a route, and where their results go."""

    task: str
    key: str
    places: list[int]
    questions: list[Question]

    @property
    def length(self) -> int:
        """Tokens of its longest question."""
        return max(
            len(question.routed) + max(map(len, question.rests)) for question in self.questions
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedScores:
    """What came out for a document, as it is logged."""

    task: str
    """The task's name in lm-eval."""
    scored: tuple[Scored, ...]
    """One a question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedText:
    """A generation, as it is logged."""

    task: str | None
    """The task's name in lm-eval; None for a prompt of none."""
    text: str
    """That followed the prompt."""
    blocks: tuple[int, ...]
    """The prompt's plan."""
    phase_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that followed and were fed, by phase; none where thinking has no budget of its own."""
    phase_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks that these ran."""


@register_model("buddy")
class BuddyLM(HFLM):  # type: ignore[misc]  # lm-eval publishes no types
    """Scores and generates under one condition at a time.

    The route of a log-likelihood request comes from its context alone, and all candidates of a
    document share it. Tokenisation, chat templates and generation are lm-eval's own.

    Args:
        pretrained: As `buddy generate --model` takes it; or a model, with `tokenizer`.
        device: Where to put the weights.
        dtype: The weights' number format.
        batch_size: Questions, or prompts of a generation, at a time; "auto" is 16.
        tokenizer: A tokenizer, or a name as of `pretrained`; a model that is given as an object
            needs one.
        log: Keeps every sample, and gives back those it has.
        on_sample: Called after each document or generation.
        **settings: Those of `Routing`, and lm-eval's own `add_bos_token`, `max_length`,
            `prefix_token_id` ...

    Raises:
        BuddyError: The model cannot be loaded, a setting is unknown or would do nothing, or the
            condition cannot be run.
    """

    def __init__(
        self,
        pretrained: str | BuddyForCausalLM,
        *,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        tokenizer: Any = None,
        log: SampleLog | None = None,
        on_sample: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        own = {field.name for field in fields(Routing)}
        routing = Routing(**{name: settings.pop(name) for name in own & settings.keys()})
        settings = followed(settings, own)
        size = batch_of(batch_size, settings.pop("max_batch_size", None))
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        if isinstance(pretrained, str):
            number = number_format(dtype)
            if device is not None and "cuda" in device and not torch.cuda.is_available():
                device = None  # lm-eval's own default; its `hf` class falls back alike
            model = BuddyForCausalLM.from_pretrained(pretrained, dtype=number, device=device)
            tokenizer = tokenizer or load_tokenizer(pretrained)
        elif device is not None or dtype is not None:
            raise PolicyError(
                "device and dtype are of a model that is loaded by its name: move or load the "
                "model that is given as an object"
            )
        else:
            model = pretrained
        super().__init__(model, tokenizer=tokenizer, batch_size=size, **settings)
        self.log = log
        """Where samples are kept."""
        self._routing, self._on_sample = routing, on_sample
        self._instances: list[Instance] | None = None
        self._rolling = "rolling"
        self._contexts: list[str] = []
        self._ran: dict[str, list[tuple[tuple[int, ...], PhaseCounts]]] = {}
        self._think_end = cast(Any, self).think_end_token
        if routing.thinking_tokens is not None:
            read_thinking_tokens(routing.thinking_tokens, model.thinking_marks)
        self.execution: dict[str, list[tuple[int, ...]]] = {}
        """The plan of each question of the present condition, by task."""
        self.phases: dict[str, list[PhaseCounts]] = {}
        """What the tokens of each of its generations ran, by task."""
        budgets = ("1.0",) if routing.budget is None else (str(routing.budget),)
        policies = () if routing.policy is None else (routing.policy,)
        self.set_condition(plan_conditions(model, policies, budgets, auto=True, thinking=True)[0])

    def set_condition(self, condition: Condition) -> None:
        """Run under another policy and budget from now on.

        Raises:
            BudgetError: As `check_condition`.
        """
        self.check_condition(condition)
        self.condition, self.execution, self.phases = condition, {}, {}
        self.model.set_policy(condition.policy)
        self.think_end_token = self._think_end
        if self._think_end is None and self._thinks:
            self.think_end_token = self.model.thinking_marks.close_token

    @property
    def _thinks(self) -> bool:
        """Whether something is asked of thinking, so that answers are what follows it."""
        return self.condition.budget.think is not None or self._routing.thinking_tokens is not None

    def check_condition(self, condition: Condition) -> None:
        """Refuse a condition that cannot be measured as it says.

        Raises:
            BudgetError: The answer is to run at a budget of its own, and to be a part of the
                prompt, as `route_on="full"` has it.
        """
        if self._routing.route_on == "full" and condition.budget.prefill is not None:
            raise BudgetError(
                "where the route sees answers too they run the prompt's budget: name one budget "
                f"for both, not {condition.budget.prefill} and {condition.blocks} blocks, or leave "
                "--route-on full out"
            )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Called by lm-eval: the log-likelihood of each text, in windows that are its task's."""
        likelihoods = [0.0] * len(requests)
        tasks = [request.task_name or "rolling" for request in requests]
        for task in dict.fromkeys(tasks):
            self._rolling = task
            mine = [place for place, own in enumerate(tasks) if own == task]
            values = cast(Any, super()).loglikelihood_rolling([requests[i] for i in mine], True)
            for place, value in zip(mine, values, strict=True):
                likelihoods[place] = value
        return likelihoods

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Called by lm-eval: (log-likelihood, is greedy) of each request.

        Raises:
            DataError: An answer is longer than the model's context.
        """
        self._instances = requests
        try:
            pairs = cast(Any, super()).loglikelihood(requests, disable_tqdm=True)
            return cast(list[tuple[float, bool]], pairs)
        finally:
            self._instances = None

    def _loglikelihood_tokens(
        self, requests: Sequence[_Encoded], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """Called by lm-eval with token ids, of requests or of rolling windows."""
        if self._thinks:
            raise BudgetError(
                "a budget or a limit of thinking is for what a model writes, and log-likelihoods "
                "are of given answers: leave it out, or name tasks that generate"
            )
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        documents = self._documents(requests)
        samples = measure_missing(
            [(document.key, document) for document in documents],
            LoggedScores,
            self.log,
            batch=self.batch_size,
            length=lambda document: document.length,
            measure=self._score,
            on_samples=self._count,
        )
        for document, sample in zip(documents, samples, strict=True):
            pairs = (
                pair
                for scored in sample.scored
                for pair in zip(scored.loglikelihoods, scored.greedy, strict=True)
            )
            for place, pair in zip(document.places, pairs, strict=True):
                results[place] = pair
            plans = [scored.blocks for scored in sample.scored]
            self.execution.setdefault(document.task, []).extend(plans)
        return results

    def _score(self, documents: "Sequence[_Document]") -> list[LoggedScores]:
        questions = [question for document in documents for question in document.questions]
        policy, source = self.condition.policy, self.condition.source
        scored = iter(score(self.model, policy, source, questions, self._routing.kv_policy))
        return [
            LoggedScores(task=document.task, scored=tuple(next(scored) for _ in document.questions))
            for document in documents
        ]

    def _count(self, items: Sequence[Any]) -> None:
        for _ in items:
            self._on_sample()

    def _documents(self, requests: Sequence[_Encoded]) -> "list[_Document]":
        """Requests about the same document belong together: they share a route."""
        instances = self._instances or [None] * len(requests)
        places: dict[tuple[Any, ...], list[int]] = {}
        for place, (request, instance) in enumerate(zip(requests, instances, strict=True)):
            if instance is None:
                document: tuple[Any, ...] = (self._rolling, place)
            else:
                # Unconditional likelihoods of the same answers are questions of their own.
                document = (
                    instance.task_name,
                    instance.doc_id,
                    request[0] is not None and request[0][0] != "",
                )
            places.setdefault(document, []).append(place)
        make = ask if self._routing.route_on == "prompt" else ask_leaking
        documents = []
        for (task, row, *_), mine in places.items():
            candidates = [requests[place][1:] for place in mine]
            try:
                questions = make(candidates, context=self.max_length)
            except DataError as error:
                raise DataError(f"{task}, row {row}: {error}") from error
            documents.append(_Document(task, self._key(task, candidates), mine, questions))
        return documents

    def _key(self, task: str | None, content: Any) -> str:
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
        return f"{self.condition.key} {task} {digest}"

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Called by lm-eval: the text that follows each prompt, up to a stop sequence."""
        samples = measure_missing(
            [(self._key(request.task_name, request.args), request) for request in requests],
            LoggedText,
            self.log,
            batch=self.batch_size,
            length=lambda request: len(request.args[0]),
            measure=self._generate,
            on_samples=self._count,
        )
        for request, sample in zip(requests, samples, strict=True):
            task = str(request.task_name)
            self.execution.setdefault(task, []).append(sample.blocks)
            counts = PhaseCounts(sample.phase_tokens, sample.phase_blocks)
            self.phases.setdefault(task, []).append(counts)
        return [sample.text for sample in samples]

    def depth(self, task: str) -> float:
        """Blocks that a token of the present condition ran on average, where no budget fixed it."""
        if self.condition.budget.think is not None:
            return PhaseCounts.total(self.phases.get(task, ())).depth
        plans = self.execution.get(task, ())
        return sum(map(len, plans)) / max(1, len(plans))

    def _generate(self, requests: Sequence[Instance]) -> list[LoggedText]:
        self._ran = {}
        texts = cast(Any, super()).generate_until(list(requests), True)
        samples = []
        for request, text in zip(requests, texts, strict=True):
            plan, counts = self._ran[request.args[0]].pop(0)
            sample = LoggedText(
                task=request.task_name,
                text=text,
                blocks=plan,
                phase_tokens=counts.tokens,
                phase_blocks=counts.blocks,
            )
            samples.append(sample)
        return samples

    def tok_batch_encode(self, strings: Any, *args: Any, **options: Any) -> Any:
        """Called by lm-eval before each batch of prompts, which it has sorted."""
        self._contexts = list(strings)
        return cast(Any, super()).tok_batch_encode(strings, *args, **options)

    def _model_generate(self, context: Any, max_length: int, stop: Any, **options: Any) -> Any:
        """Called by lm-eval for a batch of prompts."""
        trace = DepthTrace()
        out = cast(Any, super())._model_generate(
            context,
            max_length,
            stop,
            budget=self.condition.source or "auto",
            reroute=self._routing.reroute,
            kv_policy=self._routing.kv_policy,
            thinking_tokens=self._routing.thinking_tokens,
            trace=trace,
            **options,
        )
        copies = len(trace.steps[0].plans) // len(context)
        counts = [PhaseCounts()] * len(context)
        if self.condition.budget.think is not None:
            if copies > 1:
                raise BudgetError(
                    "a budget for think is counted by token, and beams change places: leave it "
                    "out, or choose tasks without num_beams"
                )
            answers = out[:, context.shape[1] :].tolist()
            counts = count_phases(self.condition.budget, trace, context.tolist(), answers)
        plans = trace.steps[0].plans[::copies]
        for text, plan, count in zip(self._contexts, plans, counts, strict=True):
            self._ran.setdefault(text, []).append((plan, count))
        return out
