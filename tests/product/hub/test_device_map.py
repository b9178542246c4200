"""Where parts of a model are loaded to: neighbouring blocks in shares of the free memory."""

import copy
from itertools import groupby

import pytest
import torch

from buddy.backbone.backbone import Backbone
from buddy.hub.device_map import map_devices
from buddy.hub.weights import empty_model
from tests.tiny import CONFIGS, all_families

GB = 1 << 30


def mapped(monkeypatch, free, *, family="llama", blocks=24):
    """The device's place among those named, by name of a part."""
    config = copy.deepcopy(CONFIGS[family])
    config.num_hidden_layers = blocks
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * blocks)[:blocks]
    devices = tuple(torch.device("cuda", at) for at in range(len(free)))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda d: (free[d.index], 99 * GB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda d: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda d: 0)
    places = map_devices(config, devices, torch.bfloat16)
    return {name: device.index for name, device in places.items()}, empty_model(config)


@all_families
def test_every_weight_has_a_place_and_what_is_no_block_is_on_the_first(monkeypatch, family):
    places, model = mapped(monkeypatch, [GB, GB], family=family, blocks=6)
    backbone = Backbone(model)
    named = {name: model.get_submodule(name) for name in places}
    held = {id(p) for part in named.values() for p in part.parameters()}
    assert held == {id(p) for p in model.parameters()}
    for name, part in named.items():
        assert places[name] == 0 or part in [*backbone.blocks[1:]], name


@pytest.mark.parametrize("free", [[GB, GB], [GB, 3 * GB], [2 * GB, GB, GB, 4 * GB]])
def test_shares_are_those_of_free_memory_to_the_nearest_block(monkeypatch, free):
    places, model = mapped(monkeypatch, free)
    order = [place for name, place in places.items() if "layers." in name]
    assert [place for place, _ in groupby(order)] == list(range(len(free)))
    sizes = [0] * len(free)
    for name, place in places.items():
        sizes[place] += sum(p.numel() for p in model.get_submodule(name).parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    wanted = [each / sum(free) * sum(sizes) for each in free]
    for size, share in zip(sizes, wanted, strict=True):
        assert abs(size - share) <= block


def test_one_device_has_all(monkeypatch):
    assert mapped(monkeypatch, [GB])[0] == {"": 0}
    assert map_devices(None, (torch.device("mps"),), torch.float32) == {"": torch.device("mps")}
