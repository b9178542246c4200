"""The bytes that a token stands for; a decoder alone would write U+FFFD for parts of characters."""

import json
import re
from functools import partial
from typing import Any, Final

_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_ALPHABET: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte
    for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""The byte of each sign of byte-level tokenizers, as GPT-2 chose them."""
_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes a token that is one byte."""


class TokenBytes:
    """Tells the UTF-8 bytes of each token of a tokenizer.

    Args:
        tokenizer: Of the tokenizers library, as transformers wraps it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
        decoder = tokenizer.backend_tokenizer.decoder
        self._kinds = set() if decoder is None else _kinds(json.loads(decoder.__getstate__()))

    def of(self, token: int) -> bytes:
        """The bytes that one token adds to a text; none of an id without a token."""
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if "ByteLevel" in self._kinds and all(sign in _ALPHABET for sign in piece):
            return bytes(_ALPHABET[sign] for sign in piece)
        if "ByteFallback" in self._kinds and (byte := _FALLBACK.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        once, twice = (str(self._decode([token] * number)) for number in (1, 2))
        # A decoder may take the space off the first token of a text.
        return twice.removeprefix(once).encode()


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """Names of a decoder and of those that it is a sequence of."""
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", ())))
