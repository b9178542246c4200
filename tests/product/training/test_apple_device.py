"""Apple's GPU knows no float64: each stage of training, and each search, makes none there.

The steps are those of `test_on_device`, of training and of searches, on another pretended device.
"""

import pytest
import torch

from tests.pretend import AppleDevice
from tests.product.importance import test_on_device as searches
from tests.product.importance.test_on_device import *  # noqa: F403
from tests.product.training import test_on_device as steps
from tests.product.training.test_on_device import *  # noqa: F403
from tests.product.training.test_on_device import few_examples  # noqa: F401


@pytest.fixture(autouse=True)
def apple(monkeypatch):
    monkeypatch.setattr("tests.pretend.DEVICE", torch.device("mps"))
    for module in (searches, steps):
        monkeypatch.setattr(module, "PretendDevice", AppleDevice)
