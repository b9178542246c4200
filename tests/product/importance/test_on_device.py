"""Searches on a GPU, pretended or real: no mixed devices, and the sets of the CPU."""

import pytest

from buddy.backbone.backbone import Backbone
from buddy.importance.indicators.indicator import INDICATORS, build_indicator
from buddy.importance.indicators.measure import measure
from buddy.importance.search.bounded import Pruning
from buddy.importance.search.sleb import sleb_search
from buddy.lab.search.passages import Passages, answers_alone
from buddy.lab.search.searched import swap_search
from tests.gpu import assert_same, move, on_gpu
from tests.lab.search.test_searched import ORDER, examples
from tests.tiny import random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("gpu")
IDS = random_ids(4, 8)
BOUNDS = {
    "exact": Pruning(bound_tokens=None),
    "bounds": Pruning(bound_tokens=20),
    "no-room": Pruning(bound_tokens=20, keep_bytes=0),
}


def on_both(work):
    expected = work(Backbone(tiny_model()))
    with on_gpu():
        made = work(Backbone(move(tiny_model())))
    return made, expected


@pytest.mark.parametrize("name", INDICATORS)
def test_an_indicator_is_measured_and_gone_on_with(name, tmp_path):
    def work(backbone):
        file = tmp_path / f"{backbone.device.type}.safetensors"
        begun = build_indicator(name, backbone)
        begun.update(IDS[:2])
        indicator = build_indicator(name, backbone)
        indicator.restore({key: tensor.clone() for key, tensor in begun.state().items()})
        return measure(indicator, IDS[2:], batch=2, resume=file)

    made, expected = on_both(work)
    assert made.device.type == "cpu"
    assert_same(made, expected, atol=1e-5, rtol=1.3e-6)


@pytest.mark.parametrize("pruning", BOUNDS.values(), ids=BOUNDS)
def test_the_searches_find_the_same_sets(pruning):
    def work(backbone):
        searched = sleb_search(backbone, IDS, 3, batch=2, pruning=pruning)
        swapped = [
            swap_search(backbone, text, ORDER, (4,), max_swaps=4, batch=2, pruning=pruning)
            for text in (Passages(IDS), answers_alone(examples()))
        ]
        return searched, swapped

    made, expected = on_both(work)
    assert made[0].order == expected[0].order
    assert_same(made[0].nll, expected[0].nll, atol=1e-5, rtol=1.3e-6)
    for found, wanted in zip(made[1], expected[1], strict=True):
        assert {d: each.blocks for d, each in found.items()} == {
            d: each.blocks for d, each in wanted.items()
        }
