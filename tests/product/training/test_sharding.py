"""FSDP2: two processes that hold halves of each block train as one that holds all of it."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.data.examples import Source
from buddy.errors import RecipeError
from buddy.processes import joined, launched
from buddy.training.recipe import AdaptedModelSettings, DataSettings
from buddy.training.router.evaluate import evaluate
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import (
    BudgetSettings,
    LoraSettings,
    OptimSettings,
    Recipe,
    RouterSettings,
)
from buddy.training.router.sharding import ShardedBlocks
from buddy.training.router.trainer import JointTrainer
from tests.product.cli.launched import call_two
from tests.product.training.examples import random_examples
from tests.tiny import random_router, tiny_model

EXAMPLES = random_examples(8)


def made(ranks=None, **optim):
    """A trainer alone, or one of several whose blocks are shared."""
    model = tiny_model("qwen3")
    recipe = Recipe(
        data=DataSettings(train=(Source(path="unused"),), max_tokens=24),
        router=RouterSettings(relaxation="gumbel", second_route=0.5),
        budget=BudgetSettings(low="0.5", high="0.5"),
        optim=OptimSettings(batch_size=5, steps=2, micro_batch_tokens=24, **optim),
        lora=LoraSettings(rank=2),
    )
    router = random_router(model, scale=0.5)
    wrapped = BuddyForCausalLM(add_lora(model, recipe.lora, seed=0), router=router).train()
    if ranks is None:
        trainer = JointTrainer(wrapped, recipe, EXAMPLES)
    else:
        sharded = ShardedBlocks(wrapped.backbone, init_device_mesh("cpu", (ranks.size,)))
        trainer = JointTrainer(
            wrapped,
            recipe,
            EXAMPLES,
            process=(ranks.rank, ranks.size),
            reduce=lambda tensor: sum(ranks.exchange(tensor)),
            gather=lambda items: [item for own in ranks.exchange(items) for item in own],
            sharded=sharded,
        )
    with torch.no_grad():
        for parameter in trainer.parameters.values():
            parameter.add_(0.05)  # B starts at zero, and A would have no slope
    return trainer


def note(called, block, *_):
    called.add(block)


def train():
    """In each process: losses, gradients, weights and evaluations are those of one."""
    with joined():
        ranks = launched()
        for checkpointed in (False, True):
            alone, shared = made(), made(ranks, activation_checkpointing=checkpointed)
            frozen = [
                p
                for block in shared.model.backbone.blocks
                for p in block.parameters()
                if not p.requires_grad
            ]
            assert frozen
            assert all(isinstance(p, DTensor) for p in frozen)
            whole, held = (
                sum(size(p) for p in frozen)
                for size in (torch.numel, lambda p: p.to_local().numel())
            )
            assert whole * 0.4 < held < whole * 0.6
            expected = alone._backward(EXAMPLES[:5], seed=5, step=0)
            called = set()
            for block, module in enumerate(shared.model.backbone.blocks):
                module.register_forward_hook(partial(note, called, block))
            found = shared._backward(EXAMPLES[:5], seed=5, step=0)
            # Some block ran on one of them alone, and one of them had another pass.
            (mine, parts), other = ranks.exchange(
                (called.copy(), len(list(shared._shares(EXAMPLES[:5]))))
            )
            assert mine ^ other[0]
            assert (parts, other[1]) == (3, 2)
            order = [0, 2, 4, 1, 3]  # rows of the first process, then of the second
            assert [row[1:] for row in found] == [expected[at][1:] for at in order]
            reached = [name for name, p in alone.parameters.items() if p.grad is not None]
            assert 0 < len(reached) < len(alone.parameters)
            assert reached == [n for n, p in shared.parameters.items() if p.grad is not None]
            for name in reached:
                # Sums over rows in another order.
                own, one = (trainer.parameters[name].grad for trainer in (shared, alone))
                assert_close(own, one, rtol=1e-4, atol=1e-6)
                assert one.any()
            for step in range(2):
                one, two = alone.step(step), shared.step(step)
                assert abs(one.loss - two.loss) < 1e-4
                assert sorted(one.plans) == sorted(two.plans)
            losses = [
                evaluate(trainer.model, EXAMPLES, (3, 6), sharded=trainer.sharded)[0]
                for trainer in (alone, shared)
            ]
            for one, two in zip(*losses, strict=True):
                assert abs(one.cross_entropy - two.cross_entropy) < 1e-4
            assert all(isinstance(p, DTensor) for p in frozen)


def test_two_processes_with_halves_of_the_blocks_step_as_one_with_all(tmp_path):
    call_two(f"{__name__}:train", tmp_path)


def test_a_base_of_four_bits_is_not_shared():
    data = DataSettings(train=(Source(path="unused"),))
    with pytest.raises(RecipeError, match=r"optim\.fsdp shares weights in their own number format"):
        Recipe(data=data, model=AdaptedModelSettings(quant="nf4"), optim=OptimSettings(fsdp=True))
