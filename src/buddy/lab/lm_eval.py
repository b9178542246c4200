"""Launcher: `python -m buddy.lab.lm_eval` is lm-eval's own command, to which `buddy` is a model.

lm-eval finds models in a table in its own code and asks no entry points, so the class has to be
added to that table before its command reads it.
"""

import sys

from buddy.errors import BuddyError
from buddy.lab.evaluation.tasks.extra import require_lm_eval
from buddy.processes import check_alone


def main() -> None:
    """Run lm-eval's command with the arguments of this process."""
    try:
        check_alone("lm-eval's own command")
        require_lm_eval()
    except BuddyError as error:
        sys.exit(f"buddy: {error}")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    model_registry.register("buddy", target="buddy.lab.evaluation.tasks.harness:BuddyLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
