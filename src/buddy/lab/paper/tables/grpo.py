"""How the Budget Predictor learns: reward, entropy and budget over the steps of stage 2."""

from typing import Any

from buddy.lab.paper.recipes import stage_2
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet


def collect(run: Run) -> Collected:
    """One `buddy train-budget`, and what its log says."""
    from buddy.records import read_record
    from buddy.training.predictor.recipe import BudgetRecipe

    model = run.request.model
    folder = run.train("predictor", "train-budget", stage_2(run, model), BudgetRecipe, model=model)
    record = read_record(folder / "record.json")
    results, config = record["results"], record["config"]
    return Collected(
        results=results,
        sheets=(_curve(results["curve"]), _evaluation(results["evaluation"])),
        facts=record["model"],
        settings={name: config[name] for name in ("predictor", "grpo", "optim", "num_blocks")},
    )


def _curve(curve: dict[str, Any]) -> Sheet:
    """Beginning, thirds and end."""
    last = len(curve["step"]) - 1
    names = ("step", "reward", "entropy", "blocks", "cross_entropy")
    body = []
    for place in sorted({0, last // 3, 2 * last // 3, last}):
        figures = [curve[name][place] for name in names[1:]]
        body.append((curve["step"][place], *(f"{figure:.3f}" for figure in figures)))
    return Sheet.of("Stage 2", ("step", "reward", "entropy", "blocks drawn", "nats a token"), body)


def _evaluation(found: dict[str, Any]) -> Sheet:
    """The predictor beside the best constant and the best budget of each prompt."""
    body = (
        ("predictor", f"{found['blocks']:.1f}", f"{found['reward']:.3f}"),
        ("best constant", found["constant_blocks"], f"{found['constant_reward']:.3f}"),
        ("best of each prompt", "", f"{found['best_reward']:.3f}"),
    )
    title = f"Validation prompts ({found['rows']})"
    return Sheet.of(title, ("who chooses", "blocks", "reward"), body)
