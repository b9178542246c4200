"""The tokenizer in a GGUF file, with what transformers leaves out put back.

A GGUF file names the rule that cuts text into words before the merges run, but does not hold it.
With the wrong rule the model still talks, only a little worse, so an unknown name is an error.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from buddy.data.tokens import end_of_turn
from buddy.errors import CheckpointError, PromptError
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
_DEFAULT: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""The rule that is called `default`: each cuts what those before it have left.

Source: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_bpe`.
"""
_ENDS_OF_TURN: Final = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>", "[EOT]"),
        "<end_of_utterance>",
    }
)
"""Control tokens that end a turn, whether a file says so or not.

Source: llama.cpp, src/llama-vocab.cpp, `special_eog_ids`.
"""
_CONTROL, _USER_DEFINED = 3, 4


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
        _mend_spelling(tokenizer, header)
    elif header.of_tokenizer("model") == "llama":
        _mend_prefix(tokenizer, header)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(tokenizer: Any, header: GgufHeader) -> int | list[int] | None:
    """What ends a text: the end token, and whatever ends a turn where that is another one."""
    named = [header.of_tokenizer(f"{key}_token_id") for key in ("eot", "eom")]
    with suppress(PromptError):  # a template that fails says so when it is used
        named.append(end_of_turn(tokenizer))
    added = tokenizer.added_tokens_decoder.items()
    named += [at for at, token in added if token.special and token.content in _ENDS_OF_TURN]
    ids = {token_id for token_id in (tokenizer.eos_token_id, *named) if token_id is not None}
    stops = sorted(ids)
    return stops[0] if len(stops) == 1 else stops or None


def _mend_word_rule(tokenizer: Any, header: GgufHeader) -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    rule = header.of_tokenizer("pre")
    splits = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    known = _ONE_DIGIT | _PLAIN | {"default", *splits}
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
    if rule == "default":
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _DEFAULT]
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spelled])
    if rule in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        if header.of_tokenizer("add_bos_token") is None and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True


def _mend_spelling(tokenizer: Any, header: GgufHeader) -> None:
    """Have control tokens stand in the vocabulary as they are written.

    Words stand there by the bytes' own letters. transformers spells all tokens so, and adds control
    tokens of other letters anew, beyond the vocabulary, or leaves them out.
    """
    from tokenizers import Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_gguf_tokenizer

    letters: dict[int, str] = cast(Any, bytes_to_unicode)()
    _, parts, _ = get_gguf_tokenizer(str(header.path))
    kinds = zip(parts["tokens"], parts.get("token_type") or (), strict=False)
    misspelt = {
        token: (at, kind)
        for at, (token, kind) in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED) and not set(token) <= set(letters.values())
    }
    if not misspelt and len(tokenizer) == len(parts["tokens"]):
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = state["model"]["vocab"], state["added_tokens"]
    added[:] = [entry for entry in added if entry["id"] < len(parts["tokens"])]
    for token, (at, kind) in misspelt.items():
        vocabulary.pop("".join(letters[byte] for byte in token.encode()), None)
        vocabulary[token] = at
        added[:] = [entry for entry in added if entry["content"] != token]
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": at, "content": token, "special": kind == _CONTROL, **plain})
    added.sort(key=lambda entry: entry["id"])
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.update_post_processor()


def _mend_prefix(tokenizer: Any, header: GgufHeader) -> None:
    """Put no space before a text where the file says so."""
    from tokenizers import decoders, pre_tokenizers

    if header.of_tokenizer("add_space_prefix", True):
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "never", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
