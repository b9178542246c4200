"""Mixture-of-Depths: each block runs a share of the tokens."""
