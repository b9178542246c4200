"""A disk that is full."""

from contextlib import contextmanager

import pytest


@contextmanager
def full_disk(num_bytes):
    """No file can grow beyond so many bytes, which fails the same writes as a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
