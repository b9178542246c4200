"""`buddy observe`: does a block's importance depend on the input, and on its context's length?"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.commands.importance import measuring
from buddy.cli.loading import computed_by
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from buddy.model import BuddyForCausalLM

_INDICATORS: Any = ["delta-ppl"]
_TEXTS: Any = ["wikitext2"]

observe = typer.Typer(
    help="See how a block's importance varies with the input.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """Which inputs are observed, and how they are run."""

    data_dir: options.DataDir = None
    inputs: Annotated[
        int,
        options.count(2, "--limit", "--inputs", help="Most windows, spread evenly over the text."),
    ] = 48
    batch: Annotated[int, options.count(1, help="Windows at a time.")] = 1
    dtype: options.Dtype = None


@observe.command()
@options.on_device
@options.grouped
def ranks(
    out: options.RecordOut,
    model: options.Model = ROUTED_MODEL,
    indicator: Annotated[
        list[str], typer.Option(help="Indicator of `buddy importance`; repeat for several.")
    ] = _INDICATORS,
    text: Annotated[
        list[str], typer.Option(help="wikitext2, ptb or a text file; repeat for several.")
    ] = _TEXTS,
    tokens: Annotated[int, options.count(4, help="Tokens of an input.")] = 256,
    *,
    inputs: InputOptions,
) -> None:
    """Rank the blocks by each input alone; rank 0 goes first.

    Interrupted, the same command goes on where it stopped.

    Example: `buddy observe ranks --text wikitext2 --text ptb --out ranks.json`
    """
    from buddy.lab.observe.observations import observe_ranks

    _check_indicators(indicator)
    observed = _Observed(model, out, text, tokens, inputs)
    series = [
        {"indicator": name, "text": source, **observed.measure(observe_ranks, name, source)}
        for source in text
        for name in indicator
    ]
    observed.save("observe-ranks", {"series": series}, indicators=indicator)


@observe.command()
@options.on_device
@options.grouped
def context(
    out: options.RecordOut,
    model: options.Model = ROUTED_MODEL,
    indicator: Annotated[str, typer.Option(help="Indicator of `buddy importance`.")] = "delta-ppl",
    text: options.Text = "wikitext2",
    start: Annotated[int, options.count(4, "--from", help="Shortest context, tokens.")] = 256,
    end: Annotated[int, options.count(5, "--to", help="Longest context, tokens.")] = 512,
    every: Annotated[int, options.count(1, help="Tokens from one to the next.")] = 32,
    *,
    inputs: InputOptions,
) -> None:
    """Rank the blocks by more and more tokens of each input.

    Interrupted, the same command goes on where it stopped.

    Example: `buddy observe context --from 256 --to 512 --out context.json`
    """
    from buddy.errors import ResultError
    from buddy.lab.observe.observations import observe_context

    _check_indicators([indicator])
    contexts = range(start, end + 1, every)
    if len(contexts) < 2 or contexts[-1] != end:
        raise ResultError(
            f"contexts go from --from {start} up to --to {end} in whole steps of --every, "
            f"got {every}: give numbers that meet, such as 256, 512 and 32"
        )
    observed = _Observed(model, out, [text], end, inputs)
    results = observed.measure(observe_context, indicator, text, list(contexts))
    results = {"indicator": indicator, "text": text, **results}
    observed.save("observe-context", results, indicators=[indicator], contexts=list(contexts))


class _Observed:
    """A model, texts cut into inputs, and what was measured of them so far."""

    def __init__(
        self, model: str, out: Path, texts: list[str], tokens: int, inputs: InputOptions
    ) -> None:
        from buddy.checkpoint.resolve import resolve
        from buddy.cli.loading import load_to_measure
        from buddy.cli.views.display import stderr
        from buddy.importance.calibration import cut_windows, read_text
        from buddy.lab.observe.inputs import spread

        contents = {source: read_text(source, inputs.data_dir) for source in texts}
        self._console, self._out, self._batch = stderr(), out, inputs.batch
        resolved = resolve(model)
        self._model = load_to_measure(
            resolved, tokens, self._console, dtype=inputs.dtype, check=_check_ranking
        )
        tokenizer = resolved.load_tokenizer()
        self._inputs = {
            source: spread(cut_windows(tokenizer, content, tokens=tokens), inputs.inputs)
            for source, content in contents.items()
        }
        self._config = {
            "model": model,
            "texts": texts,
            "inputs": inputs.inputs,
            "tokens": tokens,
            "batch": inputs.batch,
            "dtype": str(self._model.dtype),
        }
        self._files: list[Any] = []

    def measure(
        self, observation: Callable[..., dict[str, Any]], indicator: str, text: str, *contexts: Any
    ) -> dict[str, Any]:
        """One observation, by one indicator on one text."""
        from buddy.resume import ResumeFile, fingerprint

        number = len(self._files)
        about = {"batch": self._batch, "indicator": indicator, "contexts": contexts}
        identity = {**about, **computed_by(self._model)}
        path = self._out.with_name(f".{self._out.name}.{number}.partial")
        file = ResumeFile(path, {**identity, "text": fingerprint(self._inputs[text])})
        self._files.append(file)
        with measuring(self._console, self._out) as bars:
            return observation(
                indicator,
                self._model.backbone,
                self._inputs[text],
                *contexts,
                batch=self._batch,
                file=file,
                on_batch=bars.counter(f"{indicator}, {text}"),
            )

    def save(self, kind: str, results: dict[str, Any], **config: Any) -> None:
        """Write the record; only then what was kept for resuming goes."""
        from buddy.records import RunRecord

        RunRecord(
            kind=kind,
            model=self._model.facts(),
            config=self._config | config,
            results=results,
        ).save(self._out)
        for file in self._files:
            file.remove()
        sys.stdout.write(f"{self._out}\n")


def _check_ranking(outline: "BuddyForCausalLM") -> None:
    """Refuse a model whose blocks have no order."""
    from buddy.errors import ResultError

    if outline.num_blocks < 2:
        raise ResultError("a model of one block has no ranking to observe: take a larger one")


def _check_indicators(names: list[str]) -> None:
    from buddy.errors import PolicyError
    from buddy.importance.indicators.indicator import INDICATORS

    for name in names:
        if name not in INDICATORS:
            raise PolicyError(f"no indicator {name!r}: expected one of {', '.join(INDICATORS)}")


COMMAND = Command(name="observe", group="research", place=1, run=observe)
