"""Apple's GPU knows no float64: each stage of training, and each search, makes none there.

The steps are those of `test_on_device`, of training and of searches, on another pretended device.
"""

import pytest

from tests.pretend import AppleDevice
from tests.product.importance.test_on_device import *  # noqa: F403
from tests.product.training.test_on_device import *  # noqa: F403

pytestmark = []  # not on a real GPU besides


@pytest.fixture(autouse=True)
def apple(monkeypatch):
    monkeypatch.setattr("tests.pretend.TYPE", "mps")
    monkeypatch.setattr("tests.pretend.PretendDevice", AppleDevice)
