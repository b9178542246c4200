"""A router for a model whose weights stay as they are: orders searched by kind of prompt."""
