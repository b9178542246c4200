"""ROUGE of summaries."""
