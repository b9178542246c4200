"""How a launcher's processes may train: what accelerate is set to, and the device of each."""

import os
from typing import Final

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend

from buddy.errors import RecipeError, TrainingError
from buddy.hub.device import VARIABLE, pick_device
from buddy.training.router.recipe import Recipe
from buddy.training.router.trainer import JointTrainer

_SHARDED: Final = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def check_launch(accelerator: Accelerator) -> None:
    """Refuse what accelerate is configured to do and a run would not.

    Raises:
        TrainingError: It is another way to share the work, or another number format.
    """
    state, kind = accelerator.state, accelerator.distributed_type
    dynamo = state.dynamo_plugin.backend
    refused = {
        kind.value: (
            kind in _SHARDED,
            "processes share the batches, each with a whole model, or with its share of the blocks "
            "where the recipe sets optim.fsdp",
        ),
        f"mixed_precision {accelerator.mixed_precision}": (
            accelerator.mixed_precision != "no",
            "a recipe names its number format in model.dtype",
        ),
        f"dynamo_backend {dynamo.value}": (dynamo != DynamoBackend.NO, "steps are not compiled"),
        f"gradient_accumulation_steps {accelerator.gradient_accumulation_steps}": (
            accelerator.gradient_accumulation_steps > 1,
            "a recipe names the parts of a batch in optim.micro_batch_tokens",
        ),
    }
    for setting, (is_refused, why) in refused.items():
        if is_refused:
            raise TrainingError(
                f"accelerate is set to {setting}, which buddy train does not do: {why}"
            )


def own_device(accelerator: Accelerator) -> torch.device:
    """Where a process trains: of several, each has a device of its own.

    Raises:
        TrainingError: One device is named for all of them.
    """
    if accelerator.num_processes == 1:
        return pick_device(None)
    if named := os.environ.get(VARIABLE):
        raise TrainingError(
            f"{accelerator.num_processes} processes cannot share the device {named}: accelerate "
            f"gives each its own, so leave out --device and {VARIABLE}"
        )
    return torch.device(accelerator.device)


def is_to_be_sharded(recipe: Recipe, trainer: type[JointTrainer], num_processes: int) -> bool:
    """Whether processes are to hold shares of the base.

    Args:
        recipe: Says so.
        trainer: Takes the steps.
        num_processes: That were launched.

    Raises:
        RecipeError: There is one process, or the trainer's passes know no shares.
    """
    if not recipe.optim.fsdp:
        return False
    if trainer is not JointTrainer:
        raise RecipeError(
            "optim.fsdp is of adapters and routers alone, which a recipe without a method trains: "
            "leave it out"
        )
    if num_processes == 1:
        raise RecipeError(
            "optim.fsdp shares a model among processes, and one was launched: launch several "
            "(accelerate launch --multi_gpu --num_processes 4 -m buddy train ...), or leave it out"
        )
    return True
