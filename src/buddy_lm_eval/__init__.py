"""Makes `lm_eval --model buddy` work: adds our class to lm-eval's table when that is imported.

lm-eval finds models in a table in its own code and asks no entry points. `buddy_lm_eval.pth` is
installed beside this package and imports it when Python starts. It is a package of its own so that
`buddy` itself is not imported, and it does nothing until `lm_eval.models` is.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class LmEvalFinder(MetaPathFinder):
    """Finds `lm_eval.models` as Python would, and registers `buddy` once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python for each import."""
        if fullname != "lm_eval.models":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            from lm_eval.api.registry import model_registry

            run(module)
            model_registry.register("buddy", target="buddy.lab.evaluation.tasks.harness:BuddyLM")

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, LmEvalFinder())
