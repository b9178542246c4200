"""Training of methods with a gate at each block."""
