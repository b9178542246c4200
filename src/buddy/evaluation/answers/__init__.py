"""Cross-entropy of answers."""
