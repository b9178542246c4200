"""Runs a plan: the KV cache of skipped blocks, prefill, decode, generation."""
