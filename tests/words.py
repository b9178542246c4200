"""A tokenizer of whole words for the tiny models, and documents to ask them."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB


def word_tokenizer(size=VOCAB):
    """Words w3 and so on, each one token; anything else is w2."""
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, size)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<s>"
    )


def say(*ids):
    """The text of these token ids."""
    return " ".join(f"w{i}" for i in ids)
