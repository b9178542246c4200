"""What is not served is refused before anything starts, with what to set."""

import sys
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from buddy_vllm import adapter, endpoint, register
from buddy_vllm.errors import UnsupportedError
from buddy_vllm.supported import check


def config(**changes):
    made = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=True, runner_type="generate"),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        lora_config=None,
    )
    for name, value in changes.items():
        owner, _, last = name.rpartition("__")
        setattr(getattr(made, owner) if owner else made, last, value)
    return made


def test_what_is_served():
    check(config(), False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_config__enforce_eager": False}, "set --enforce-eager"),
        ({"model_config__runner_type": "pooling"}, "leave --runner out"),
        ({"speculative_config": object()}, "leave --speculative-config out"),
        ({"kv_transfer_config": object()}, "leave --kv-transfer-config out"),
        ({"ec_transfer_config": object()}, "leave --ec-transfer-config out"),
        ({"lora_config": object()}, "leave --enable-lora out"),
        ({"parallel_config__data_parallel_size": 2}, "run replicas"),
        ({"parallel_config__decode_context_parallel_size": 2}, "leave context parallelism out"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "leave context parallelism out"),
        ({"parallel_config__use_ubatching": True}, "leave --enable-dbo"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "leave --kv-sharing-fast-prefill out"),
    ],
)
def test_what_is_not(changes, says):
    with pytest.raises(UnsupportedError) as caught:
        check(config(**changes), False)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UnsupportedError) as caught:
        check(config(lora_config=object(), model_config__enforce_eager=False), True)
    for says in ("unset VLLM_USE_RUST_FRONTEND", "--enforce-eager", "--enable-lora"):
        assert says in str(caught.value)


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.33.0rc1", "1.32.0", "0.3.2", "dev"])
def test_in_another_minor_of_vllm_the_plugin_steps_aside_with_one_line(found, caplog):
    assert not adapter.is_written_for(found)
    [line] = [record.getMessage() for record in caplog.records]
    assert f"is written for vLLM 0.32, and this is {found}: it does nothing here" in line
    assert "\n" not in line


def test_other_models_are_served_by_another_minor_of_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0"))
    register.register()  # and reaches for no other part of vLLM
    app = FastAPI()
    endpoint.BuddyEndpoint().attach_router(app)


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.32.0+cpu"])
def test_its_own_minor_is_known(found, caplog):
    assert adapter.is_written_for(found)
    assert not caplog.records


def test_the_vllm_that_is_installed_is_of_the_minor_that_the_adapter_is_written_for():
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    assert adapter.is_written_for()


@pytest.mark.parametrize("name", adapter.BACKENDS)
def test_attention_that_keeps_groups_apart_is_served(name):
    adapter.check_backend(name)


@pytest.mark.parametrize("name", ["FLASHINFER", "FLASHMLA", "FLEX_ATTENTION"])
def test_other_attention_is_refused_with_what_to_set(name):
    with pytest.raises(UnsupportedError, match=f"attention by {name}.*--attention-backend.*FLASH"):
        adapter.check_backend(name)


def test_an_engine_of_ours_checks_its_attention_when_it_starts(monkeypatch):
    utils = pytest.importorskip("vllm.v1.worker.utils", reason="vLLM is not installed here")
    register.register()
    group = utils.AttentionGroup(SimpleNamespace(get_name=lambda: "FLASHINFER"), [], None, 0)
    ours = SimpleNamespace(model_config=SimpleNamespace(architecture="BuddyLlamaForCausalLM"))
    with pytest.raises(UnsupportedError, match="FLASHINFER"):
        group.create_metadata_builders(ours, "cpu")
