"""Instruction data: rows of a file or of the hub, turned into prompts and answers of tokens."""
