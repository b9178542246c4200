"""Is the Budget Predictor worth its training? Its price by one split, its gain by another.

Training prompts are measured at every depth, and so are the held-out ones of the recipe
(`data.validation`). Of each source every other held-out prompt chooses the price of depth
(`grpo.lambda_cost`): the one at which the predictor gains most over the training prompts' best
constant, in standard errors. On the other half the predictor is compared at that price with rules
that need none: the constant, a constant by source, the prompt's length, and ridge regression, all
fitted to the training prompts. Gains are paired by prompt, and a prompt's reward is the mean over
seeds.

Tables are kept in --runs; a run that was interrupted goes on, and other prices need no model.

    python benchmarks/predictor_price.py recipes/smollm2-135m-budget.toml \
        --out results/training/predictor-price.json
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path

from buddy.drawn import drawn_by
from buddy.errors import RecipeError
from buddy.lab import experiment
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.settings import read_recipe
from buddy.training.predictor.loss_table import LossTable, measure_table
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.reward_model import RewardModel, StandardisedPrompts, folded
from buddy.training.predictor.rules import CONSTANT, Rules, places_by_source
from buddy.training.predictor.run import TRAIN_TABLE, VALIDATION_TABLE, rows_of_steps
from buddy.training.predictor.trainer import PredictorTrainer
from buddy.training.run import Run
from buddy.training.summaries import Standard, draw_summaries

PRICES = (0.05, 1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 12.0)
"""The paper's price first."""


def main():
    """Measure, train at each price, choose one, compare; print and record the tables."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/predictor-price"))
    parser.add_argument("--prices", type=float, nargs="+", default=list(PRICES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    recipe = read_recipe(BudgetRecipe, args.recipe, args.set)
    router, facts, rows, train, held_out, left_out = tables(recipe, args.runs)
    chooses, tests = halves(held_out)
    found = {}
    for price in args.prices:
        priced = replace(recipe, grpo=replace(recipe.grpo, lambda_cost=price))
        predictors = [trained(priced, seed, router, rows, train) for seed in args.seeds]
        rules = Rules(train, priced.grpo, predictors[0].lowest)
        found[price] = (rules, predictors, compare(rules, predictors, chooses))
        print(said(price, found[price][2][CONSTANT]), flush=True)
    price = max(found, key=lambda price: sureness(found[price][2][CONSTANT]))
    rules, predictors, _ = found[price]
    tested = compare(rules, predictors, tests)
    constant = rules.measured(tested)
    results = {
        "rows": {
            "train": len(train.examples),
            "choose": len(chooses.examples),
            "test": len(tests.examples),
        },
        "left_out": left_out,
        "prices": [{"price": price, "choosing": each[2]} for price, each in found.items()],
        "price": price,
        "chosen": [choices(predictor, tests) for predictor in predictors],
        "tested": tested,
        "constant": asdict(constant),
    }
    config = {**experiment.texts(args), "recipe": args.recipe.read_text()}
    experiment.save(args.out, "predictor-price", results, config=config, model=facts)
    print(f"\nprice {price:g}: {constant.describe()}\n\n{table(tested)}")


def tables(recipe, folder):
    """The router's settings, facts of the model, training rows, their table, and that of others.

    A held-out prompt that is trained on tells nothing: it is left out, and counted.
    """
    run = Run(recipe, folder, resume=True)
    model = run.load_model()
    live, rows = RewardModel(model), run.read_rows()
    lowest = BudgetPredictor(live.router.config, recipe.predictor).lowest
    seen = {(row.prompt, row.answer) for row in rows.train}
    held_out = [row for row in rows.validation if (row.prompt, row.answer) not in seen]
    held_out = list(dict.fromkeys(held_out))
    counts = {source: len(places) for source, places in places_by_source(held_out).items()}
    if min(counts.values(), default=0) < 4:
        raise RecipeError(
            "data.validation: half of each source's prompts choose the price and the other half "
            "test it: expected 4 prompts or more of each source that are not trained on, got "
            f"{', '.join(f'{count} of {source}' for source, count in counts.items()) or 'none'}"
        )
    with run.claimed():
        train, tested = (
            measure_table(
                live,
                part,
                folder / name,
                lowest=lowest,
                batch_size=recipe.measure.batch_size,
                on_rows=lambda done, total: print(
                    f"{done} of {total} rows measured", file=sys.stderr
                ),
            )
            for part, name in ((rows.train, TRAIN_TABLE), (held_out, VALIDATION_TABLE))
        )
    left_out = len(rows.validation) - len(held_out)
    return live.router.config, model.facts(), rows.train, train, tested, left_out


def halves(table):
    """Every other row of each source, and the rest."""
    sources = places_by_source(table.examples).values()
    return tuple(
        part_of(table, sorted(place for places in sources for place in places[first::2]))
        for first in (0, 1)
    )


def part_of(table, places):
    """Some rows of a table."""
    examples = [table.examples[place] for place in places]
    return LossTable(examples, table.summaries(examples), table.by_depth[places])


def trained(recipe, seed, router, rows, table):
    """The predictor that `buddy train-budget` makes of these tables."""
    recipe = replace(recipe, optim=replace(recipe.optim, seed=seed))
    with drawn_by(seed):
        predictor = BudgetPredictor(router, recipe.predictor)
    prompts, standard = table, None
    if recipe.optim.standardise:
        seen = rows_of_steps(recipe, rows)
        standard = Standard.of(draw_summaries(table.summaries, seen, seed))
        prompts = StandardisedPrompts(table, standard)
    trainer = PredictorTrainer(predictor, prompts, recipe, rows)
    for step in range(trainer.steps):
        trainer.step(step)
    return folded(predictor, standard)


def compare(rules, predictors, table):
    """What predictors gain over the rules, their rewards averaged by prompt."""
    summaries = table.summaries(table.examples)
    return rules.compare(table, *(predictor.choose(summaries) for predictor in predictors))


def choices(predictor, table):
    """How many distinct budgets a predictor chooses, and their mean."""
    chosen = predictor.choose(table.summaries(table.examples))
    return {"distinct": len(chosen.unique()), "blocks": float(chosen.double().mean())}


def sureness(gain):
    """A gain in standard errors; a predictor that is the constant itself gains nothing."""
    return gain["gain"] / gain["error"] if gain["error"] else 0.0


def said(price, gain):
    """A line of the terminal."""
    return f"price {price:g}: {figure(gain)} over the constant {gain['blocks']:.0f} blocks"


def figure(gain):
    """A gain and its standard error."""
    return f"{gain['gain']:+.3f}" + ("" if gain["error"] is None else f" ± {gain['error']:.3f}")


def table(tested):
    """Gains over each rule, over all prompts and by source."""
    sources = list(tested[CONSTANT]["by_source"])
    head = ("predictor less", "mean blocks", "all", *sources)
    rows = [
        (
            rule,
            f"{gain['blocks']:.1f}",
            figure(gain),
            *(figure(gain["by_source"][source]) for source in sources),
        )
        for rule, gain in tested.items()
    ]
    return experiment.markdown(head, rows)


if __name__ == "__main__":
    experiment.run(main)
