"""The training: a draw."""

from dataclasses import asdict

import torch

from buddy import BuddyForCausalLM
from buddy.records import RunRecord
from buddy.training.run import RunListener
from buddy.training.state import CHECKPOINT, RECORD, check_folder, make_folder

from .policy import ToyPart, ToySizes


def train_toy(recipe, out, *, resume=False, listener=None):
    """Draw the scores and write a checkpoint."""
    listener = listener or RunListener()
    check_folder(out, resume)
    model = BuddyForCausalLM.from_pretrained(recipe.model.name, policy="full")
    part = ToyPart(ToySizes(num_blocks=model.num_blocks))
    listener.started(0, 1)
    draw = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        part.scores.copy_(torch.rand(model.num_blocks, generator=draw))
    listener.stepped(1, {"loss": 0.0})
    model.learned = part
    model.set_policy(ToyPart.policy)
    make_folder(out)
    model.save_pretrained(out / CHECKPOINT)
    record = RunRecord(kind="training", model=model.facts(), config=asdict(recipe), results={})
    record.save(out / RECORD)
    return out / CHECKPOINT
