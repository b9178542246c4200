"""Models: where they lie, how they are read, and what runs a plan through them."""
