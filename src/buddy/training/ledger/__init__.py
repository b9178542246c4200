"""Fitting a ledger: what depth is worth to each token, measured on answers."""
