"""Rows, examples and texts from files."""
