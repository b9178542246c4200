"""Figures from RunRecords, one a file. They run no model and read nothing else."""
