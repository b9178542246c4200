"""First weights come from a seed alone, and leave every other generator as it was."""

import pytest
import torch

from buddy.drawn import drawn_by


def test_the_same_seed_draws_the_same_and_others_go_on():
    torch.manual_seed(0)
    others = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    with drawn_by(7):
        own = torch.rand(3)
    second = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(own, torch.rand(3))
    assert torch.equal(torch.cat([first, second]), others)


def test_no_gpu_is_seeded_or_set_up(monkeypatch):
    def touched(*_, **__):
        pytest.fail("a GPU was touched")

    for name in ("manual_seed_all", "manual_seed", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with drawn_by(1):
        torch.rand(1)
    with pytest.raises(pytest.fail.Exception), torch.random.fork_rng(devices=[0]):
        pass
