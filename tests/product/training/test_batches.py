import torch

from buddy.data.examples import Example
from buddy.training.batches import BatchOrder, collate
from tests.product.training.examples import random_examples


def test_an_epoch_shows_every_example_once_and_the_next_in_another_order():
    examples = random_examples(64)
    order = BatchOrder(examples, 4, seed=3)
    assert order.per_epoch == 16
    epochs = [[e for step in range(16) for e in order[16 * n + step]] for n in range(2)]
    assert sorted(epochs[0], key=hash) == sorted(examples, key=hash)
    assert sorted(epochs[1], key=hash) == sorted(examples, key=hash)
    assert epochs[0] != epochs[1]


def test_a_step_is_the_same_whenever_it_is_asked_for():
    examples = random_examples(64)
    order, resumed = BatchOrder(examples, 4, seed=3), BatchOrder(examples, 4, seed=3)
    passed = [order[step] for step in range(40)]
    assert resumed[37] == passed[37]
    assert resumed[2] == passed[2]
    assert BatchOrder(examples, 4, seed=4)[2] != passed[2]


def test_examples_of_similar_length_stand_together():
    examples = random_examples(400, longest=60)
    order = BatchOrder(examples, 8, seed=0)
    pads = grouped = 0
    for step in range(order.per_epoch):
        lengths = [example.num_tokens for example in order[step]]
        pads += max(lengths) * 8 - sum(lengths)
        grouped += sum(lengths)
    assert pads < 0.1 * grouped


def test_collate_marks_the_positions_that_predict_the_answer():
    batch = collate([Example((5, 6, 7), (8, 9), "a"), Example((3,), (4,), "a")])
    assert batch.token_ids.shape == (2, 16)
    assert batch.token_ids[0, :6].tolist() == [5, 6, 7, 8, 9, 0]
    assert batch.is_prompt[:, :4].tolist() == [[True] * 3 + [False], [True] + [False] * 3]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.columns.tolist() == [2, 3, 0]
    assert batch.targets.tolist() == [8, 9, 4]
    assert torch.equal(batch.answer_tokens, torch.tensor([2, 1]))
