"""A file for each table, or for a group of like tables: what is run, and what is told."""
