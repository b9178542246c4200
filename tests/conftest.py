"""Shared set-up: one thread a worker, as tiny models gain nothing from more; and Ctrl-C counts."""

import signal

import pytest
import torch

torch.set_num_threads(1)

# A shell's background jobs ignore Ctrl-C, and so would every process that a test sends one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def noted_elsewhere(tmp_path_factory, monkeypatch):
    """Note what is found out of the models of tests in a folder of the tests' own."""
    from buddy.checkpoint import quick_prior  # not before pytest checks shapes of what is imported
    from buddy.hub import verified

    folder = tmp_path_factory.getbasetemp() / "home"
    for module in (verified, quick_prior):
        monkeypatch.setattr(module, "cache_home", lambda: folder)
