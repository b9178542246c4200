"""The heat map: three classes that anyone can tell apart, and the rates in their places."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from buddy.errors import ResultError
from buddy.lab.plots.draw import heatmap
from buddy.lab.plots.draw.heatmap import KEPT, SKIPPED, VARIES, rate_colour
from tests.lab.plots.made import execution, execution_record, record


def cells(axes):
    """Colours, [rows, blocks, 3]."""
    mesh = axes.collections[0]
    rows = len(axes.get_yticks())
    return mesh.get_facecolor()[:, :3].reshape(rows, -1, 3)


def drawn(entries, **options):
    figure = heatmap.draw([record("eval-tasks", {"execution": entries})], **options)
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def lightness(colour):
    """CIE L*, 0 to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    y = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return 116 * y ** (1 / 3) - 16


def test_rates_are_three_classes_in_their_places():
    entries = [
        execution("a", 3, [1.0, 0.0, 0.5, 0.5, 1.0], num_blocks=5),
        execution("a", 4, [1.0, 1.0, 0.25, 0.75, 1.0], num_blocks=5),
    ]
    (axes,) = drawn(entries).values()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["4", "3"]
    deep, shallow = cells(axes)
    kept, skipped = to_rgb(KEPT), to_rgb(SKIPPED)
    np.testing.assert_allclose(shallow[[0, 1, 4]], [kept, skipped, kept])
    np.testing.assert_allclose(shallow[2], to_rgb(VARIES(0.5)))
    np.testing.assert_allclose(deep[[0, 1, 4]], [kept] * 3)
    np.testing.assert_allclose(deep[[2, 3]], [to_rgb(VARIES(0.25)), to_rgb(VARIES(0.75))])


def test_classes_differ_in_lightness_too_and_darken_with_the_rate():
    rates = [0.0, 1e-3, 0.25, 0.5, 0.75, 0.999, 1.0]
    shades = [lightness(rate_colour(rate)) for rate in rates]
    assert shades == sorted(shades, reverse=True)
    assert shades[0] - shades[1] > 4
    assert shades[0] - shades[3] > 10
    assert shades[-2] - shades[-1] > 15


def test_almost_always_is_not_always():
    assert rate_colour(0.9999) != rate_colour(1.0)
    assert rate_colour(0.0001) != rate_colour(0.0)
    assert rate_colour(sum([1 / 49] * 49)) == rate_colour(1.0)


def test_groups_are_policies_if_there_are_several_else_tasks():
    rates = [1.0, 0.0, 1.0]
    first = [execution("a", 2, rates, task, num_blocks=3) for task in ("piqa", "boolq")]
    assert list(drawn(first)) == ["a, PIQA", "a, BoolQ"]
    other = execution("b", 2, rates, "piqa", num_blocks=3)
    both = drawn([*first, other])
    assert list(both) == ["a", "b"]
    assert both["b"].get_xlabel() == "Block (mean of 1 to 2 tasks)"
    third = execution("b", 2, rates, "boolq", num_blocks=3)
    assert drawn([*first, other, third])["b"].get_xlabel() == "Block (mean of 2 tasks)"
    chosen = drawn([*first, other], task="piqa")
    assert chosen["b"].get_xlabel() == "Block (PIQA)"


def test_what_no_budget_fixes_is_one_row_over_all_tasks_beside_other_policies():
    ran = {"piqa": [1.0, 1.0, 0.0, 1.0], "boolq": [1.0, 0.0, 0.0, 1.0]}
    free = [
        execution("a auto", round(sum(rates)), rates, task, num_blocks=4)
        | {"mean_blocks": sum(rates)}
        for task, rates in ran.items()
    ]
    assert [len(cells(axes)) for axes in drawn(free).values()] == [1, 1]
    fixed = [execution("b", 2, [1.0, 0.0, 0.0, 1.0], task, num_blocks=4) for task in ran]
    both = drawn([*free, *fixed])
    (row,) = cells(both["a auto"])
    np.testing.assert_allclose(row[1], to_rgb(VARIES(0.5)))
    assert both["b"].get_xlabel() == "Block (mean of 2 tasks)"


def test_a_block_that_all_tasks_keep_stays_of_that_class_in_their_mean():
    tasks = {"piqa": [1.0, 0.0, 1.0, 0.0], "boolq": [1.0, 0.0, 0.0, 1.0], "mmlu": [1.0, 0.0, 1, 0]}
    entries = [execution("a", 2, rates, task, num_blocks=4) for task, rates in tasks.items()]
    entries.append(execution("b", 2, [1.0, 1.0, 0.0, 0.0], num_blocks=4))
    (row,) = cells(drawn(entries)["a"])
    np.testing.assert_allclose(row[:2], [to_rgb(KEPT), to_rgb(SKIPPED)])
    np.testing.assert_allclose(row[2], to_rgb(VARIES(2 / 3)))


def test_dense_rows_are_left_out_unless_they_are_all_there_is():
    dense = {**execution("full", 3, [1.0] * 3, num_blocks=3), "policy": "full"}
    other = execution("a", 2, [1.0, 0.0, 1.0], num_blocks=3)
    assert list(drawn([dense, other])) == ["a, PIQA"]
    assert list(drawn([dense])) == ["full, PIQA"]


def test_two_sets_of_rates_for_one_row_are_refused():
    entries = [
        execution("a", 2, [1.0, 0.0, 1.0], num_blocks=3),
        execution("a", 2, [1.0, 1.0, 0.0], num_blocks=3),
    ]
    with pytest.raises(ResultError, match="'a' has two sets of rates on piqa at 2 blocks"):
        drawn(entries)


def test_an_unknown_task_is_refused():
    with pytest.raises(ResultError, match="no task 'boolq' in these records: there is task piqa"):
        heatmap.draw([execution_record()], task="boolq")


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ([1.0, 0.5], "rates must be 3 long, got 2"),
        ([1.0, 1.2, 0.0], r"rates\[1\] must be at least 0 and at most 1, got 1.2"),
        ([1.0, None, 0.0], r"rates\[1\]: expected float, got null"),
    ],
)
def test_rates_that_are_no_rates_are_refused(rates, says):
    entry = {**execution("a", 2, [1.0, 0.0, 1.0], num_blocks=3), "rates": rates}
    with pytest.raises(ResultError, match=rf"execution\[0\]: {says}"):
        heatmap.draw([record("eval-tasks", {"execution": [entry]})])
