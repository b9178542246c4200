"""Shared set-up: one thread a process, as tiny models gain nothing from more; and Ctrl-C counts."""

import os
import signal

# Before torch is imported, and for the processes that tests start: two workers whose commands had
# two threads each would mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest

UNCHECKED = tuple(
    f"tests/{place}"
    for place in (
        *("real/", "parity/", "hostile/", "compatibility/", "deploy/"),
        *(f"lab/{part}/" for part in ("cli", "load", "paper", "plots")),
        *(f"product/{part}/" for part in ("serving", "generation", "importance", "cli", "hub")),
        *(f"product/engine/test_{part}" for part in ("host_waits", "interrupts", "multiply")),
        "product/engine/test_graphs.py::test_a_padded_batch",
        "product/engine/test_lanes.py::test_random_schedules",
        "product/engine/test_lanes.py::test_the_general_path",
        "product/training/test_budget_run.py::test_killed_and_resumed",
        "product/training/test_on_device.py",
        "lab/evaluation/test_on_device.py",
        "product/training/test_joint.py::test_the_loss_falls",
        "methods/gated/test_run.py::test_adapters_and_gates_are_trained",
        "methods/gated/test_run.py::test_the_depth_goes_where",
        "methods/layerskip/test_run.py::test_every_exit_gets_better",
    )
)
"""Checking the shape of every array nearly doubles the time of these tests: what they call is
checked by the others."""

# A shell's background jobs ignore Ctrl-C, and so would every process that a test sends one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    jaxtyping.config.update("jaxtyping_disable", item.nodeid.startswith(UNCHECKED))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch  # not by the process that hands tests to the workers

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def noted_elsewhere(tmp_path_factory, monkeypatch):
    """Note what is found out of the models of tests in a folder of the tests' own."""
    from buddy.checkpoint import quick_prior  # not before pytest checks shapes of what is imported
    from buddy.hub import notes, verified

    folder = tmp_path_factory.getbasetemp() / "home"
    for module in (notes, verified, quick_prior):
        monkeypatch.setattr(module, "cache_home", lambda: folder)


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """Run a test on a pretended GPU and on a real one: `tests.gpu` has what it is moved by."""
    import torch  # as above

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    monkeypatch.setattr("tests.gpu.KIND", request.param)
    return request.param
