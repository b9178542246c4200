"""Shared set-up: one thread a worker, as tiny models gain nothing from more."""

import torch

torch.set_num_threads(1)
