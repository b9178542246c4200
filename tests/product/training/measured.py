"""Measurements of a tiny model, as a run makes them."""

from buddy.training.measurements import Measurements
from buddy.training.run import Run, RunListener
from buddy.training.workers import Workers


def measurements(model, folder, size=3):
    """Those of a model, whose files lie in a folder; their run has no recipe."""
    run = object.__new__(Run)
    run.out, run.listener = folder, RunListener()
    return Measurements(run, model, Workers(model.device), size)
