"""The frozen model whose distributions are taught: it runs at full depth, beside each step.

A row comes once or twice in a run, so what the teacher makes of it is not kept.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.checkpoint.folder import load
from buddy.errors import RecipeError
from buddy.hub.loading import load_tokenizer
from buddy.model import BuddyForCausalLM
from buddy.training.batches import Batch
from buddy.training.fast import fast_passes
from buddy.training.joint.choosing import plain_choice
from buddy.training.joint.recipe import Recipe
from buddy.training.joint.straight_through import straight_through_pass


def load_teacher(recipe: Recipe, student: BuddyForCausalLM) -> BuddyForCausalLM | None:
    """The teacher, in the student's dtype and on its device; None where none is named.

    Raises:
        RecipeError: It predicts other tokens than the student.
        BuddyError: It cannot be loaded.
    """
    name = recipe.teacher.name
    if name is None:
        return None
    words, own = (load_tokenizer(one).get_vocab() for one in (name, recipe.model.name))
    if words != own:
        raise RecipeError(
            f"teacher.name: {name} has another vocabulary ({len(words):,} tokens) than "
            f"{recipe.model.name} ({len(own):,}): name a model with the same tokenizer"
        )
    made = load(name, dtype=student.dtype, device=student.device, policy="full", merge_adapter=True)
    size, wanted = made.config.vocab_size, student.config.vocab_size
    if size != wanted:
        raise RecipeError(
            f"teacher.name: the logits of {name} have {size:,} tokens, and those of "
            f"{recipe.model.name} {wanted:,}: name a model with as many"
        )
    made.model.requires_grad_(False)
    return made.eval()


@torch.no_grad()
def teacher_pass(
    teacher: BuddyForCausalLM, batch: Batch
) -> Float[Tensor, "batch tokens teacher_hidden"]:
    """The teacher's residual after its last block, at full depth.

    Args:
        teacher: Frozen.
        batch: Prompts and answers.
    """
    policy = teacher.scoring_policy
    depths = torch.full_like(batch.token_ids, teacher.num_blocks)
    with fast_passes(teacher.backbone):
        out = straight_through_pass(teacher.backbone, policy, batch, depths, plain_choice(policy))
    return out.hidden
