"""Budgets: how they are written, and who says at each step how many blocks may run."""
