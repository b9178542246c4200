"""The tokenizer in a GGUF file, with what transformers leaves out put back.

A GGUF file names the rule that cuts text into words before the merges run, but does not hold it.
With the wrong rule the model still talks, only a little worse, so an unknown name is an error.
"""

from pathlib import Path
from typing import Any, Final

from buddy.errors import CheckpointError
from buddy.hub.gguf.header import GgufHeader

_ONE_DIGIT: Final = frozenset({"smollm", "starcoder", "refact", "codeshell", "minerva-7b"})
"""GPT-2's rule with every digit a word of its own; transformers reads these as plain GPT-2."""
_PLAIN: Final = frozenset({None, "gpt-2", "mpt", "olmo", "jais", "trillion"})
"""GPT-2's rule, which is also what a file that names none was made with."""
_WHOLE_WORDS: Final = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken"}
)
"""A word found in the vocabulary is not cut, and text begins with the begin token.

Source: llama.cpp, src/llama-vocab.cpp, `ignore_merges` and `add_bos` of these rules.
"""


def load_tokenizer(header: GgufHeader, folder: Path) -> Any:
    """The file's tokenizer, as a transformers object.

    Args:
        header: Of the GGUF file.
        folder: Any folder without a tokenizer in it.

    Raises:
        CheckpointError: The file names a word rule that is not known here.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=str(header.path))
    if header.of_tokenizer("model") == "gpt2":
        _mend_word_rule(tokenizer, header)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(tokenizer: Any, header: GgufHeader) -> int | list[int] | None:
    """What ends a text: the end token, and the end of a turn where that is another one."""
    named = (tokenizer.eos_token_id, header.of_tokenizer("eot_token_id"))
    stops = sorted({token_id for token_id in named if token_id is not None})
    return stops[0] if len(stops) == 1 else stops or None


def _mend_word_rule(tokenizer: Any, header: GgufHeader) -> None:
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    rule = header.of_tokenizer("pre")
    known = _ONE_DIGIT | _PLAIN | set(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)
    if rule not in known:
        raise CheckpointError(
            f"{header.path} cuts text into words by the unknown rule {rule!r}; "
            f"expected one of {', '.join(sorted(name for name in known if name))}; "
            "use the model's safetensors folder instead"
        )
    backend = tokenizer.backend_tokenizer
    if rule in _ONE_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    if rule in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        if header.of_tokenizer("add_bos_token") is None and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True
