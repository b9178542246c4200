"""Training: adapters and router, then the Budget Predictor, then the ledger; one run for all."""
