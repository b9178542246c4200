"""What tests of grammars share: a maker of grammars over bytes, and a model that writes bytes."""

import pytest

from buddy.serving.rows.grammar import GrammarMaker
from tests.product.serving.made import END, VOCAB, byte_buddy, byte_tokenizer


@pytest.fixture(scope="module")
def maker():
    return GrammarMaker(byte_tokenizer(), VOCAB, [END])


@pytest.fixture(scope="module")
def buddy():
    return byte_buddy("static:2,3,4,1")
