"""Training states: damaged ones are refused; forged ones, too, or they fit the run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from buddy.errors import TrainingError
from buddy.resume import ResumeFile
from buddy.training.state import load_state, save_state
from tests.hostile.fuzz import FUZZ, JSON, damaged, only_ours

STEPS, IDENTITY = 6, {"seed": 3}


def fresh():
    parameters = {name: torch.ones(2, 3).requires_grad_() for name in ("a", "b")}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    return {"identity": IDENTITY, "parameters": parameters, "optimizer": optimizer}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    path, run = tmp_path_factory.mktemp("state") / "state.safetensors", fresh()
    sum(p.square().sum() for p in run["parameters"].values()).backward()
    run["optimizer"].step()
    save_state(path, step=3, extra={"seconds": 1.5}, **run)
    return path, path.read_bytes(), load_file(path)


def load(path):
    into, seconds = fresh(), []

    def restore(begun, carried):
        seconds.append(float(carried["seconds"]))

    done = load_state(path, steps=STEPS, restore=restore, **into)
    return done, into


def test_damaged_bytes_are_refused_or_change_nothing(state):
    path, content, tensors = state

    @FUZZ
    @given(damaged(content))
    def check(found):
        path.write_bytes(found)

        def go_on():
            done, into = load(path)
            assert done == 3  # the damage is in what the header may have or leave out
            for name, parameter in into["parameters"].items():
                assert torch.equal(parameter, tensors[f"parameter.{name}"])

        error = only_ours(go_on)
        assert isinstance(error, TrainingError | None)

    check()


def test_forged_values_and_tensors_are_refused_or_fit(state):
    path, _, tensors = state
    shapes = st.lists(st.integers(0, 4), max_size=3)
    names = st.sampled_from([*tensors, "parameter.c", "optimizer.a:x", "", "\n"])
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool])

    @FUZZ
    @given(
        st.dictionaries(st.sampled_from(["step", "extra", "other"]), JSON | st.integers(-1, 8)),
        st.dictionaries(names, st.tuples(shapes, dtypes), max_size=2),
        st.sampled_from([*tensors, None]),
    )
    def check(values, forged, without):
        made = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in forged.items()}
        kept = {name: tensor for name, tensor in tensors.items() if name != without}
        values = {"step": 3, "extra": {"seconds": 1}, **values}
        ResumeFile(path, IDENTITY).write({**kept, **made}, **values)

        def go_on():
            done, into = load(path)
            assert 0 <= done <= STEPS
            for parameter in into["parameters"].values():
                parameter.sum().backward()
            into["optimizer"].step()

        only_ours(go_on)

    check()
