"""Training: stage 1 (LoRA and router together), stage 2 (Budget Predictor)."""
