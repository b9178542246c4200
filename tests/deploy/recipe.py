"""The recipe for replicas as a module: it lies outside the package."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "deploy"


def load():
    """The module, which imports neither Ray nor Buddy before it is asked to start something."""
    if "replicas" not in sys.modules:
        spec = importlib.util.spec_from_file_location("replicas", FOLDER / "replicas.py")
        module = sys.modules["replicas"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["replicas"]
