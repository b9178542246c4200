"""Shared set-up: one thread a worker, as tiny models gain nothing from more; and Ctrl-C counts."""

import signal

import torch

torch.set_num_threads(1)

# A shell's background jobs ignore Ctrl-C, and so would every process that a test sends one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
