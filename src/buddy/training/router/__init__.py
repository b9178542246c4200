"""Stage 1: adapters and router trained together, a budget drawn for every example."""
