"""`buddy observe`: does a block's importance depend on the input, and on its context's length?"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.commands.importance import computed_by, measuring

if TYPE_CHECKING:
    from buddy.model import BuddyForCausalLM

observe = typer.Typer(
    help="See how a block's importance varies with the input.",
)

Model = Annotated[str, typer.Argument(help="Preset, hub id, folder, GGUF file or checkpoint.")]
Inputs = Annotated[int, options.count(2, help="Windows, spread evenly over the text.")]
Batch = Annotated[int, options.count(1, help="Windows at a time.")]


@observe.command()
def ranks(
    model: Model,
    out: options.RecordOut,
    indicator: Annotated[
        list[str] | None, typer.Option(help="Indicator of `buddy importance`; may be given again.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="wikitext2, ptb or a text file; may be given again.")
    ] = None,
    data_dir: options.DataDir = None,
    inputs: Inputs = 48,
    tokens: Annotated[int, options.count(4, help="Tokens of an input.")] = 256,
    batch: Batch = 1,
    dtype: options.Dtype = None,
) -> None:
    """Rank the blocks by each input alone; rank 0 goes first.

    Interrupted, the same command goes on where it stopped.
    """
    from buddy.lab.observe.observations import observe_ranks

    indicators, texts = indicator or ["delta-ppl"], text or ["wikitext2"]
    _check_indicators(indicators)
    observed = _Observed(model, out, texts, data_dir, inputs, tokens, batch, dtype)
    series = [
        {"indicator": name, "text": source, **observed.measure(observe_ranks, name, source)}
        for source in texts
        for name in indicators
    ]
    observed.save("observe-ranks", {"series": series}, indicators=indicators)


@observe.command()
def context(
    model: Model,
    out: options.RecordOut,
    indicator: Annotated[str, typer.Option(help="Indicator of `buddy importance`.")] = "delta-ppl",
    text: Annotated[str, typer.Option(help="wikitext2, ptb or a text file.")] = "wikitext2",
    data_dir: options.DataDir = None,
    inputs: Inputs = 48,
    start: Annotated[int, options.count(4, "--from", help="Shortest context, tokens.")] = 256,
    end: Annotated[int, options.count(5, "--to", help="Longest context, tokens.")] = 512,
    every: Annotated[int, options.count(1, help="Tokens from one to the next.")] = 32,
    batch: Batch = 1,
    dtype: options.Dtype = None,
) -> None:
    """Rank the blocks by more and more tokens of each input.

    Interrupted, the same command goes on where it stopped.
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
    observed = _Observed(model, out, [text], data_dir, inputs, end, batch, dtype)
    results = observed.measure(observe_context, indicator, text, list(contexts))
    results = {"indicator": indicator, "text": text, **results}
    observed.save("observe-context", results, indicators=[indicator], contexts=list(contexts))


class _Observed:
    """A model, texts cut into inputs, and what was measured of them so far."""

    def __init__(
        self,
        model: str,
        out: Path,
        texts: list[str],
        data_dir: Path | None,
        inputs: int,
        tokens: int,
        batch: int,
        dtype: str | None,
    ) -> None:
        from buddy.checkpoint.resolve import load_tokenizer
        from buddy.cli.loading import check_room, load_checked, say_if_slow
        from buddy.cli.views.display import stderr
        from buddy.errors import ResultError
        from buddy.importance.calibration import cut_windows, read_text, spread

        calibration = {source: read_text(source, data_dir) for source in texts}
        self._console, self._out, self._batch = stderr(), out, batch

        def check(outline: "BuddyForCausalLM") -> None:
            if outline.num_blocks < 2:
                raise ResultError(
                    "a model of one block has no ranking to observe: take a larger one"
                )
            check_room(outline, tokens)

        self._model = load_checked(model, check, self._console, options.FULL, dtype=dtype)
        say_if_slow(self._model, self._console)
        tokenizer = load_tokenizer(model)
        self._inputs = {
            source: spread(cut_windows(tokenizer, found, tokens=tokens), inputs)
            for source, found in calibration.items()
        }
        self._config = {
            "model": model,
            "texts": texts,
            "inputs": inputs,
            "tokens": tokens,
            "batch": batch,
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
        with measuring(self._console) as bar:
            task = bar.add_task(f"{indicator}, {text}")
            return observation(
                indicator,
                self._model.backbone,
                self._inputs[text],
                *contexts,
                batch=self._batch,
                file=file,
                on_batch=lambda done, total: bar.update(task, completed=done, total=total),
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


def _check_indicators(names: list[str]) -> None:
    from buddy.errors import PolicyError
    from buddy.importance.indicators.indicator import INDICATORS

    for name in names:
        if name not in INDICATORS:
            raise PolicyError(f"no indicator {name!r}: expected one of {', '.join(INDICATORS)}")


COMMAND = Command(name="observe", group="research", place=1, run=observe)
