"""Generation: transformers' `generate` under a budget."""
