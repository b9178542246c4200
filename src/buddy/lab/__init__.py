"""The lab: evaluation, plots, the paper's tables, observations, load tests; and their commands."""
