"""DASH: gates that look at the block before."""
