"""Decode steps in compiled code, fed from the model's own weights."""
