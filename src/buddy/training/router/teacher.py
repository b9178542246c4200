"""The model whose distributions are taught: it runs at full depth, beside each step."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.checkpoint.resolve import resolve
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.training.batches import Batch, check_context
from buddy.training.fast import fast_passes
from buddy.training.router.choosing import plain_choice
from buddy.training.router.recipe import OWN_TEACHER, Recipe
from buddy.training.router.straight_through import straight_through_pass


def check_teacher(
    recipe: Recipe, student: BuddyForCausalLM, load_tokenizer: Callable[[], Any]
) -> None:
    """Refuse a teacher that cannot teach this student, before weights are fetched.

    Args:
        recipe: That may name one.
        student: Or its outline.
        load_tokenizer: Loads the student's.

    Raises:
        RecipeError: It predicts other tokens than the student, or holds shorter examples.
        BuddyError: It cannot be found or understood.
    """
    name, own = recipe.teacher.name, recipe.model.name
    if name is None or name == OWN_TEACHER:
        return
    teacher = resolve(name)
    outline = BuddyForCausalLM.outline(teacher)
    words, wanted = teacher.load_tokenizer().get_vocab(), load_tokenizer().get_vocab()
    if words != wanted:
        raise RecipeError(
            f"teacher.name: {name} has another vocabulary ({len(words):,} tokens) than {own} "
            f"({len(wanted):,}): name a model with the same tokenizer"
        )
    if outline.backbone.vocab != student.backbone.vocab:
        raise RecipeError(
            f"teacher.name: {name} makes {outline.backbone.vocab:,} logits and {own} "
            f"{student.backbone.vocab:,}: name a model with as many"
        )
    check_context(recipe.data.max_tokens, outline, f"the context of the teacher {name}")


def load_teacher(recipe: Recipe, student: BuddyForCausalLM) -> BuddyForCausalLM | None:
    """The teacher, in the student's dtype and on its device; None where none is named.

    The student itself where it is its own.

    Raises:
        BuddyError: It cannot be loaded.
    """
    name = recipe.teacher.name
    if name is None:
        return None
    if name == OWN_TEACHER:
        return student
    dtype, device = student.dtype, student.device
    return BuddyForCausalLM.from_pretrained(
        name, dtype=dtype, device=device, policy="full", merge_adapter=True
    ).eval()


@torch.no_grad()
def teacher_pass(
    teacher: BuddyForCausalLM, batch: Batch
) -> Float[Tensor, "batch tokens teacher_hidden"]:
    """The teacher's residual after its last block, at full depth, without dropout.

    Args:
        teacher: It gets no gradient.
        batch: Prompts and answers.
    """
    policy = teacher.scoring_policy
    depths = torch.full_like(batch.token_ids, teacher.num_blocks)
    was_training = teacher.training
    teacher.eval()
    try:
        with fast_passes(teacher.backbone):
            choice = plain_choice(policy)
            out = straight_through_pass(teacher.backbone, policy, batch, depths, choice)
    finally:
        teacher.train(was_training)
    return out.hidden
