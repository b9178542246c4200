"""buddy.json: what a checkpoint consists of, and which base model it was made for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from buddy.backbone.backbone import Backbone
from buddy.backbone.depth_scales import DepthScalesConfig
from buddy.backbone.quantised import Quantisation
from buddy.checkpoint.listed_files import MANIFEST, ListedFile, describe_files
from buddy.engine.state.cache import KVPolicy
from buddy.errors import CheckpointError
from buddy.hub.safe_paths import read_table
from buddy.hub.tokenizer import tokenizer_fingerprint
from buddy.routing.budget_predictor import BudgetPredictorConfig
from buddy.routing.ledger import LedgerConfig
from buddy.routing.measured_constant import MeasuredConstant
from buddy.routing.router import RouterConfig
from buddy.settings import build

FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Which base model a checkpoint was made for."""

    source: str | None
    """Where it is loaded from; None = from the checkpoint's own folder `backbone`."""
    model_type: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    fingerprint: str | None
    """Fingerprint of its weights. None where they go by the same name in several number formats, of
    which any will do."""
    tokenizer: str | None = None
    """Fingerprint of its tokenizer, which is asked where that of the weights is None."""
    quant: Quantisation | None = None
    """How the weights in the checkpoint's own folder are quantised; None where they are plain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedSettings:
    """The trained part of a method; see `policies.learned`."""

    policy: str
    settings: dict[str, Any]
    """What gives it its shapes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What buddy.json says."""

    format: int
    base: Base
    router: RouterConfig | None
    predictor: BudgetPredictorConfig | None = None  # older checkpoints say nothing of one
    constant: MeasuredConstant | None = None
    """What the predictor was measured against."""
    ledger: LedgerConfig | None = None  # nor of one
    learned: LearnedSettings | None = None
    depth_scales: DepthScalesConfig | None = None
    policy: str
    kv_policy: KVPolicy
    files: dict[str, ListedFile]

    def __post_init__(self) -> None:
        source = self.base.source
        if self.base.fingerprint is None and self.base.tokenizer is None:
            raise CheckpointError("base: expected the fingerprint of its weights or its tokenizer")
        if source is not None and self.base.quant is not None:
            raise CheckpointError(
                f"base: quantised weights ({self.base.quant}) are those of the checkpoint's own "
                f"folder, and source names others, {source[:200]!r}"
            )
        if source is not None and not (source.isprintable() and source.strip()):
            raise CheckpointError(f"base.source must name a model or be null, got {source!r}")
        if self.predictor is not None and self.router is None:
            raise CheckpointError("predictor: it reads what a router reads, and there is none")
        if self.constant is not None and self.predictor is None:
            raise CheckpointError(
                "constant: a predictor was measured against it, and there is none"
            )
        if self.constant is not None and self.constant.most_blocks > self.base.num_blocks:
            raise CheckpointError(
                f"constant: it has {self.constant.most_blocks} blocks, and the base model "
                f"{self.base.num_blocks}"
            )
        scales = self.depth_scales
        if scales is not None and scales.depths[-1] > self.base.num_blocks:
            raise CheckpointError(
                f"depth_scales: the largest of its depths is {scales.depths[-1]} blocks, and the "
                f"base model has {self.base.num_blocks}"
            )
        if self.ledger is not None and self.ledger.levels[-1] > self.base.num_blocks:
            raise CheckpointError(
                f"ledger: its highest level is {self.ledger.levels[-1]} blocks, and the base model "
                f"has {self.base.num_blocks}"
            )
        if self.router is not None and self.router.num_blocks != self.base.num_blocks:
            raise CheckpointError(
                f"router: it is for {self.router.num_blocks} blocks, and the base model has "
                f"{self.base.num_blocks}"
            )


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a Buddy checkpoint, whole or not."""
    try:
        return (folder / MANIFEST).exists()
    except OSError:  # a name that is too long for a folder's
        return False


def read_manifest(folder: Path) -> Manifest:
    """Read buddy.json. The files that it lists are not looked at: see `check_files`.

    Raises:
        CheckpointError: It is damaged, or of another format.
    """
    path = folder / MANIFEST
    values = read_table(folder, MANIFEST)
    if values.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {str(values.get('format'))[:80]}, this version reads {FORMAT}: "
            "install the version of Buddy that wrote it"
        )
    if not isinstance(values.get("files"), dict):
        raise CheckpointError(f"{path} is damaged: it has no files: copy the checkpoint again")
    try:
        return build(Manifest, values, str(path), CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: copy the checkpoint again") from error


def write_manifest(folder: Path, contents: dict[str, Any]) -> None:
    """Write buddy.json over all files that the folder holds."""
    manifest = {"format": FORMAT, **contents, "files": describe_files(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def check_policy(folder: Path, manifest: Manifest) -> str:
    """The policy of a checkpoint.

    Raises:
        CheckpointError: It would be read from a file, which may lie anywhere.
    """
    _, _, argument = manifest.policy.partition(":")
    if argument.endswith(".json") or set(argument) & set("/\\"):
        raise CheckpointError(
            f"{folder / MANIFEST} asks for policy {manifest.policy[:200]!r}, which is read from a "
            "file outside of the checkpoint: name a policy yourself (policy=, --policy), that one "
            "if you trust it"
        )
    return manifest.policy


def identity(backbone: Backbone, fingerprint: str | None) -> dict[str, Any]:
    """What makes a base model this one: its sizes, and a fingerprint of its weights."""
    config = backbone.config
    return {
        "model_type": config.model_type,
        "num_blocks": backbone.num_blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "fingerprint": fingerprint,
    }


def check_tokenizer(folder: Path, expected: Base, tokenizer: Any) -> None:
    """Refuse a base model whose tokenizer is another; its weights may be of any number format.

    Raises:
        CheckpointError: It makes other tokens of a text.
    """
    if expected.tokenizer != tokenizer_fingerprint(tokenizer):
        raise CheckpointError(
            f"{folder} was made for another base model: its tokenizer makes other tokens of a text "
            "than that of the model found; load the base model it names"
        )


def check_base(folder: Path, expected: Base, backbone: Backbone, fingerprint: str | None) -> None:
    """Refuse a base model that the checkpoint was not made for.

    Raises:
        CheckpointError: It is another model, or its weights were rounded to float16.
    """
    for key, value in identity(backbone, fingerprint).items():
        wanted = getattr(expected, key)
        if wanted == value or (key == "fingerprint" and wanted is None):
            continue
        if key == "fingerprint" and backbone.dtype is torch.float16:
            raise CheckpointError(
                f"{folder} was made for another base model, or for these weights before they were "
                "rounded to float16: load it in bfloat16 or float32"
            )
        raise CheckpointError(
            f"{folder} was made for another base model: {key} is {wanted!r} there "
            f"and {value!r} in the model found; load the base model it names"
        )
