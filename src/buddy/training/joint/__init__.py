"""Stage 1: LoRA and router together."""
