"""Stage 2: the Budget Predictor."""
