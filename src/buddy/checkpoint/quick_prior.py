"""A quick prior: cosine importance over a text that ships with Buddy, measured when first needed.

`<home>/priors/<fingerprint>.json` keeps it as a record, such as `buddy importance` writes, whatever
number format it was measured in: bfloat16 and int4 of one model then remove the same blocks. Two
processes that measure at a time both write the whole file, and nothing is lost.
"""

import hashlib
import json
import logging
import os
import shlex
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.checkpoint.resolve import Resolved
from buddy.data.tokens import begin_of_text
from buddy.depth.prior import OnProgress, Prior
from buddy.engine.influence import summary_cosine
from buddy.errors import PolicyError, ResultError
from buddy.hub.folder import cache_home
from buddy.hub.presets import PRESETS
from buddy.hub.progress import silent
from buddy.hub.tokenizer import sample_text
from buddy.policies.static import StaticPolicy
from buddy.records import RunRecord, read_record
from buddy.routing.prior import normalise_prior

WINDOW: Final = 128
"""Tokens that see one another; fewer where the context is shorter."""
WINDOWS: Final = 4
"""Windows, as far apart as the text allows: it has several kinds and languages."""
_LOG: Final = logging.getLogger("buddy")


class QuickPrior(Prior):
    """Read from the cache, or measured, when it is first asked for.

    Args:
        backbone: The model that is measured.
        fingerprint: Of the model's weights.
        model: What the backbone was loaded from; the tokenizer comes from there too.
    """

    def __init__(self, backbone: Backbone, fingerprint: str, model: Resolved) -> None:
        self._backbone, self._fingerprint, self._model = backbone, fingerprint, model
        self._values = None
        self._source = "order measured when a budget first needs it"

    def values(
        self, on_progress: OnProgress | None = None, *, advises: bool = True
    ) -> Float[Tensor, " middle"]:
        """Normalised importance of the middle blocks.

        Args:
            on_progress: Told how far it is, where it is measured now.
            advises: Whether the log then tells of better orders.

        Raises:
            CheckpointError: The model's tokenizer cannot be loaded.
            PolicyError: The model computes what is no number.
        """
        if self._values is None:
            path = prior_path(self._fingerprint)
            importance = self._cached(path)
            if importance is None:
                importance = self._measure(on_progress, advises=advises)
                is_saved = "cached" if self._save(path, importance) else "not cached"
                self._source = f"order measured now by a quick cosine pass ({is_saved})"
            else:
                self._source = "order of a quick cosine pass (cached)"
            self._values = _normalised(importance)
        return self._values

    @property
    def fingerprint(self) -> None:
        """The values follow from the model's weights."""
        return None

    def _identity(self) -> dict[str, Any]:
        """What a cached prior must be of, so that it is this one."""
        return {
            "fingerprint": self._fingerprint,
            "num_blocks": self._backbone.num_blocks,
            "indicator": "cosine",
            "text_sha256": hashlib.sha256(sample_text().encode()).hexdigest(),
            "window": WINDOW,
            "windows": WINDOWS,
        }

    def _cached(self, path: Path) -> list[float] | None:
        """Each block's importance, if it was measured earlier."""
        if not os.path.exists(path):  # asked so, it is False where the cache is not ours to see
            return None
        try:
            record = read_record(path)
            if not self._identity().items() <= record["config"].items():
                raise ResultError("it is of another model, text or measurement")
            importance = record["results"].get("importance")
            if not isinstance(importance, list) or len(importance) != self._backbone.num_blocks:
                raise ResultError(f"it lacks the importance of {self._backbone.num_blocks} blocks")
            if not all(type(score) is float for score in importance):
                raise ResultError("an importance in it is no number")
        except ResultError as error:
            _LOG.warning("the cached prior %s cannot be used (%s): measured anew", path, error)
            return None
        return importance

    def _measure(self, on_progress: OnProgress | None, *, advises: bool) -> list[float]:
        width = min(WINDOW, self._backbone.config.max_position_embeddings)
        windows = quick_windows(self._model.load_tokenizer(), width)
        if not len(windows[0]):
            raise PolicyError(
                f"the blocks of {self._model.key} cannot be ordered: its tokenizer makes no tokens "
                "of a text; correct it, or name --policy random"
            )
        num_blocks = self._backbone.num_blocks
        advice = "; buddy route searches better ones by kind of prompt, and fits a router to them"
        _LOG.info(
            "measuring a quick order of the %d blocks, once for this model%s",
            num_blocks,
            advice if advises else "",
        )
        summed, done = torch.zeros(num_blocks, dtype=torch.float64), 0

        def count(block: int) -> None:
            nonlocal done
            done += 1
            (on_progress or silent)("measure", done, len(windows) * num_blocks)

        for window in windows:
            summed += summary_cosine(self._backbone, window[None], count)
        if not bool(summed.isfinite().all()):
            raise PolicyError(
                f"the blocks of {self._model.key} cannot be ordered: in {self._backbone.dtype} it "
                "computes what is no finite number; load it in another number format, or name "
                "--policy random"
            )
        scores: list[float] = (summed / len(windows)).tolist()
        return scores

    def _save(self, path: Path, importance: list[float]) -> bool:
        """Write the record; where it cannot be written, the next process measures again."""
        order = StaticPolicy(Prior(_normalised(importance)), len(importance)).removal_order
        record = RunRecord(
            kind="importance-cosine",
            command=shlex.join(
                ["buddy", "generate", "hello", "--model", self._model.key, "-b", "0.5"]
            ),
            model={
                "num_blocks": self._backbone.num_blocks,
                "base": self._fingerprint.partition("-")[0],  # what follows is of an adapter
            },
            config={
                "model": self._model.key,
                "dtype": str(self._backbone.dtype),
                "device": self._backbone.device.type,
                **self._identity(),
            },
            results={"importance": importance, "removal_order": list(order)},
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            record.save(path)
        except (OSError, ResultError) as error:
            _LOG.warning("the prior that was measured is not kept: %s", error)
            return False
        return True


def shipped_prior(name: str) -> Prior | None:
    """The prior that ships with a preset; None where there is none."""
    preset = PRESETS.get(name)
    if preset is None or preset.prior is None:
        return None
    record = json.loads((files("buddy.hub") / "priors" / preset.prior).read_text())
    importance = torch.tensor(record["results"]["importance"])
    return Prior(normalise_prior(importance[1:-1]), f"prior that ships, {preset.prior}")


def is_cached(model: Resolved) -> bool:
    """Whether a quick prior is kept that was measured on this model.

    Weights are not read, so the model may have changed since.
    """
    for path in (cache_home() / "priors").glob("*.json"):
        with suppress(ResultError):
            config = read_record(path)["config"]
            if isinstance(config, dict) and config.get("model") == model.key:
                return True
    return False


def prior_path(fingerprint: str) -> Path:
    """Where the quick prior of a model is kept."""
    return cache_home() / "priors" / f"{fingerprint}.json"


def quick_windows(tokenizer: Any, width: int) -> list[Int[Tensor, " tokens"]]:
    """Windows of the text, far apart; each begins as the tokenizer begins a text."""
    begin = begin_of_text(tokenizer)
    ids = tokenizer(sample_text(), add_special_tokens=False, verbose=False)["input_ids"]
    step = width - len(begin)
    whole = list(range(0, len(ids) - step + 1, step)) or [0]
    chosen = whole[:: max(1, len(whole) // WINDOWS)][:WINDOWS]
    return [torch.tensor(begin + ids[at : at + step], dtype=torch.long) for at in chosen]


def _normalised(importance: list[float]) -> Float[Tensor, " middle"]:
    return normalise_prior(torch.tensor(importance[1:-1], dtype=torch.float64))
