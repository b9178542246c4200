"""The training: a draw."""

import torch

from buddy.training.run import Run

from .policy import ToyPart, ToySizes


def train_toy(recipe, out, *, resume=False, listener=None):
    """Draw the scores; the run loads the model, reads the rows and writes what it leaves."""
    run = Run(recipe, out, resume=resume, listener=listener)
    model, rows = run.load_model(policy="full"), run.read_rows()
    run.warn(rows.left_out)
    part = ToyPart(ToySizes(num_blocks=model.num_blocks))
    run.listener.started(0, 1)
    draw = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        part.scores.copy_(torch.rand(model.num_blocks, generator=draw))
    run.listener.stepped(1, {"loss": 0.0})
    model.put_part(part)
    results = {"rows": len(rows.train)}
    return run.finish(model, kind="training", rows=rows, results=results)
