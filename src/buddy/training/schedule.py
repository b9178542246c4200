"""How the learning rate rises and falls, as a share of its peak."""

import math

from buddy.training.router.recipe import OptimSettings


def learning_rate_share(settings: OptimSettings, step: int, steps: int) -> float:
    """Share of the peak rate at a step, counted from 0; the first is above zero, the last too."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0 if step < open_steps(settings, steps) else (steps - step) / settings.decay_steps
    left = (steps - step) / max(1, steps - settings.warmup_steps)
    return left if settings.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def open_steps(settings: OptimSettings, steps: int) -> int:
    """Steps at the start of a run that are the same however many steps it has in all."""
    return steps - settings.decay_steps if settings.schedule == "constant" else 0
