"""Who runs blocks: the general path, compiled code, CUDA graphs."""
