"""The lab: what measures, compares and draws models. The product and the methods import none of it.

`evaluation`
    A run of conditions, each a policy at a budget, on tasks, answers, texts, summaries or speed.
    `samples.py` is the log that a run goes on from, `against.py` an earlier run beside it.
`observe`
    Whether a block's importance depends on the input and on its context.
`search`
    The best set of blocks at each depth, by exchanges.
`load`
    An open-loop load on a server.
`plots`
    Figures from records: `read` makes dataclasses of their results, `draw` has a figure a file.
`paper`
    The paper's tables made again: `tables.toml` lists them, `tables` has a collector for each,
    `published` the paper's own numbers.
`cli`
    The commands of all of these.

`steps.py` says whether what an earlier run left may be used; `experiment.py` has what scripts of
`benchmarks/` share. Whatever is measured ends as a `buddy.records.RunRecord`.
"""
