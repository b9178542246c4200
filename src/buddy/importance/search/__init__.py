"""Searches for blocks to remove."""
