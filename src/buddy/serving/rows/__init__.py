"""Continuous batching: each running request has a row of the cache, and one pass feeds all rows.

Entry: `engine.py`, the thread and its door; it steps a `batcher.py`. A `row.py` is one request on
its way: its `text.py`, its `sampler.py`, its `grammar.py`. `pool.py` keeps the beginnings that
requests share, and `calibrate.py` measures what a step costs.
"""
