"""Measures of a block's importance."""
