"""Where tests of the GPU's path run: on a pretended device, and on a real one where there is one.

What uses the fixture `gpu` runs on both. `pytest -m gpu` runs those of the real one, which skip and
say so where there is none.
"""

from contextlib import nullcontext

import torch
from torch.testing import assert_close

from tests import pretend

KIND = "pretended"
"""Or "cuda", where the fixture `gpu` says so."""


def is_real():
    """Whether the test runs on a real device."""
    return KIND == "cuda"


def on_gpu():
    """Within, what names the device makes tensors on it."""
    return nullcontext() if is_real() else pretend.PretendDevice()


def move(module):
    """Put all parameters, buffers and other tensors of a module there."""
    if not is_real():
        return pretend.move(module)
    for part in module.modules():
        for name, value in vars(part).items():
            if type(value) is torch.Tensor:
                setattr(part, name, value.cuda())
    return module.cuda()


def is_there(tensor):
    """Whether a tensor is on the device."""
    return tensor.is_cuda if is_real() else isinstance(tensor, pretend.OnDevice)


def assert_same(made, expected, *, atol=0.0, rtol=0.0):
    """The numbers of the CPU: the same operations in the same order, unless the device is real."""
    real = {"atol": max(atol, 1e-4), "rtol": max(rtol, 1e-3)}
    assert_close(made, expected, **(real if is_real() else {"atol": atol, "rtol": rtol}))
