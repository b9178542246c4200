"""What records call things, as a reader of a figure would."""

from pathlib import PurePath
from typing import Final

_INDICATORS: Final = {
    "delta-ppl": "ΔPPL",
    "taylor": "Taylor",
    "fisher": "Fisher",
    "grad-norm": "Gradient norm",
    "cosine": "Cosine",
    "block-influence": "Block influence",
    "sleb": "SLEB",
}
_TEXTS: Final = {
    "wikitext2": "WikiText-2",
    "ptb": "PTB",
    "piqa": "PIQA",
    "boolq": "BoolQ",
    "social_iqa": "SIQA",
    "hellaswag": "HellaSwag",
    "winogrande": "WinoGrande",
    "arc_easy": "ARC-Easy",
    "arc_challenge": "ARC-Challenge",
    "openbookqa": "OpenBookQA",
    "gsm8k": "GSM8K",
    "mmlu": "MMLU",
    "samsum": "SAMSum",
    "alpaca": "Alpaca",
    "lambada_openai": "LAMBADA",
}
_METRICS: Final = {
    "acc": "accuracy",
    "acc_norm": "normalised accuracy",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
}


def indicator_name(indicator: str) -> str:
    """Name of an importance indicator."""
    return _INDICATORS.get(indicator, indicator)


def text_name(text: str) -> str:
    """Name of a task or a text; a file's stem."""
    return _TEXTS.get(text, PurePath(text).stem)


def metric_name(metric: str) -> str:
    """Name of a metric within a sentence; lm-eval puts the filter of an answer after a comma."""
    metric, _, source = metric.partition(",")
    name = _METRICS.get(metric, metric.replace("_", " "))
    return f"{name}, {source}" if source else name


def policy_name(policy: str) -> str:
    """Name of a policy's spec: a file's folders and suffix say nothing to a reader."""
    name, _, argument = policy.partition(":")
    if argument.endswith(".json"):
        argument = PurePath(argument).stem
    return f"{name} {argument}".strip()


def sentence(text: str) -> str:
    """The text with a capital first letter, and the rest as it is."""
    return text[:1].upper() + text[1:]
