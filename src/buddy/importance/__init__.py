"""How much each block matters, measured on a model."""
