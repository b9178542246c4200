"""Buddy inside vLLM: each request runs exactly as many blocks as its budget allows.

`buddy export` writes the folder that is served. Nothing of `buddy` is imported here.
"""
