"""One command for each table and figure of the paper, on any model."""
