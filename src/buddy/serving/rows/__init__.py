"""Continuous batching: rows, sampling, and the thread that runs them."""
