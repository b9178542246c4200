"""The domain: budgets, plans, their one selection, and what they cost. Pure torch, no I/O."""
