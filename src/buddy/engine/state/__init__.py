"""What sequences carry from step to step."""
