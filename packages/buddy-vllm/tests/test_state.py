"""V2's model state hands each pass the plans of its requests; batches are made by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from buddy_vllm.batch import KEY
from buddy_vllm.state_v2 import routed_state

BLOCKS = 4


class Base:
    """The part of vLLM's `DefaultModelState` that the plugin builds on."""

    def __init__(self, model, device):
        self.model, self.device = model, device
        self.called = []

    def add_request(self, req_index, new_req_data):
        self.called.append(("add", req_index, new_req_data.req_id))

    def remove_request(self, req_id):
        self.called.append(("remove", req_id))

    def prepare_attn(self, input_batch, mode, tables, slots, groups, config, for_capture=False):
        self.called.append(("attn", config, for_capture))
        return {"layer": "metadata"}

    def prepare_inputs(self, input_batch, req_states):
        return {"positions": "theirs"}


@pytest.fixture
def state():
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=BLOCKS))
    return routed_state(Base)(model, torch.device("cpu"))


def arrival(name, blocks):
    extra = None if blocks is None else {KEY: blocks}
    return SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=extra))


def batch(*names, counts):
    return SimpleNamespace(req_ids=list(names), num_scheduled_tokens=np.array(counts, np.int32))


def test_each_pass_gets_the_plans_of_its_requests_in_its_order(state):
    state.add_request(0, arrival("a", [0, 3]))
    state.add_request(1, arrival("b", None))
    state.add_request(2, arrival("c", [0, 1, 3]))
    groups = [[SimpleNamespace(layer_names=["x"])]]
    assert state.prepare_attn(None, 0, (), None, groups, "config", for_capture=True) == {
        "layer": "metadata"
    }
    made = state.prepare_inputs(batch("c", "a", "b", counts=[5, 1, 2]), None)
    assert made["positions"] == "theirs"
    assert made["buddy"].runs.astype(int).tolist() == [[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]
    assert made["buddy"].counts.tolist() == [5, 1, 2]
    assert made["buddy"].group(1).tokens.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert ("attn", "config", True) in state.called
    assert ("add", 2, "c") in state.called


def test_a_preempted_request_comes_back_with_its_plan(state):
    state.add_request(0, arrival("a", [0, 3]))
    state.remove_request("a")
    state.add_request(5, arrival("a", [0, 3]))
    made = state.prepare_inputs(batch("a", counts=[1]), None)
    assert made["buddy"].runs.astype(int).tolist() == [[1, 0, 0, 1]]


def test_a_request_that_left_and_one_that_never_came_run_full_depth(state):
    state.add_request(0, arrival("a", [0, 3]))
    state.remove_request("a")
    state.remove_request("a")  # vLLM removes what may not be there
    made = state.prepare_inputs(batch("a", "dummy", counts=[1, 1]), None)
    assert made["buddy"].runs.all()


def test_pooling_requests_have_no_sampling_parameters(state):
    state.add_request(0, SimpleNamespace(req_id="p", sampling_params=None))
    assert state.prepare_inputs(batch("p", counts=[3]), None)["buddy"].runs.all()


def test_vllm_finds_the_state_by_the_model():
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from buddy_vllm.model import RoutedLlama, RoutedQwen2

    for model in (RoutedLlama, RoutedQwen2):
        found = resolve_model_state_cls(None, model)
        assert issubclass(found, DefaultModelState)
        assert found is routed_state(DefaultModelState)
