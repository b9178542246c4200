"""Buddy checkpoints: safetensors and JSON."""
