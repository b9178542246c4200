import pytest

from tests.lab.paper import made


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return made.save_model(tmp_path_factory.mktemp("reproduce") / "model")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return made.save_data(tmp_path_factory.mktemp("reproduce") / "data")


@pytest.fixture
def commands_here(monkeypatch):
    """Steps that are commands run in this process."""
    monkeypatch.setattr("buddy.lab.paper.run.Run._process", made.in_this_process)
