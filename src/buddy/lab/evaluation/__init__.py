"""Measures a model under every policy and budget asked for, resumably, into RunRecords."""
