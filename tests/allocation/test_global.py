"""One threshold for all layers, counted by hand."""

import logging

import pytest
import torch

from sparsecomp import Global


def masks(scores, sparsity, **options):
    dims = options.pop("unit_dims", None)
    before = options.pop("masks", None)
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in scores.items()}
    result = Global(**options)(tensors, sparsity, before, dims)
    return {name: mask.tolist() for name, mask in result.items()}


def test_by_hand():
    scores = {"a": [[5.0, 1.0], [2.0, 8.0]], "b": [3.0, 9.0, 4.0, 7.0]}
    assert masks(scores, 0.5, min_keep=0) == {"a": [[True, False], [False, True]], "b": [False, True, False, True]}


def test_a_layer_of_small_scores_may_end_at_another_sparsity():
    scores = {"small": [1.0, 2.0, 3.0, 4.0], "large": [10.0, 20.0, 30.0, 40.0]}
    assert masks(scores, 0.5, min_keep=0) == {"small": [False] * 4, "large": [True] * 4}


def test_ties_go_in_order_of_position():
    assert masks({"a": [1.0, 1.0], "b": [1.0, 1.0]}, 0.75, min_keep=0) == {"a": [False, False], "b": [False, True]}


@pytest.mark.parametrize(("sparsity", "dropped"), [(0.0, 0), (0.04, 0), (0.05, 1), (0.14, 1), (0.15, 2), (0.99, 10)])
def test_halves_round_up(sparsity, dropped):
    kept = masks({"a": list(range(10))}, sparsity, min_keep=0)["a"]
    assert kept == [False] * dropped + [True] * (10 - dropped)


def test_what_was_dropped_stays_dropped_and_counts():
    """The two largest were dropped before; of the four asked for, two more go."""
    before = {"a": torch.tensor([True, True, False, False]), "b": torch.tensor([True] * 4)}
    kept = masks({"a": [1.0, 2.0, 9.0, 9.0], "b": [3.0, 0.5, 4.0, 5.0]}, 0.5, masks=before, min_keep=0)
    assert kept == {"a": [False, True, False, False], "b": [True, False, True, True]}


# min_keep


def test_min_keep_moves_the_loss_to_other_layers_and_says_so(caplog):
    scores = {"small": [1.0, 2.0, 3.0, 4.0], "large": [10.0, 20.0, 30.0, 40.0]}
    with caplog.at_level(logging.WARNING, "sparsecomp"):
        kept = masks(scores, 0.5, min_keep=1)
    assert kept == {"small": [False, False, False, True], "large": [False, True, True, True]}
    assert caplog.messages == ["min_keep acted: small keeps 1; other layers lose more instead."]


def test_min_keep_that_makes_the_sparsity_impossible_says_so(caplog):
    with caplog.at_level(logging.WARNING, "sparsecomp"):
        kept = masks({"a": [1.0, 2.0], "b": [3.0, 4.0]}, 0.75, min_keep=1)
    assert kept == {"a": [False, True], "b": [False, True]}
    assert caplog.messages == ["min_keep acted: a keeps 1, b keeps 1, and the sparsity stays below what was asked for."]


def test_min_keep_that_does_not_act_says_nothing(caplog):
    with caplog.at_level(logging.WARNING, "sparsecomp"):
        masks({"a": [1.0, 4.0], "b": [2.0, 3.0]}, 0.5, min_keep=1)
    assert caplog.messages == []


def test_guarding_one_layer_may_make_another_need_it():
    """All of a would go; then b's would, and b keeps its 2; then c pays."""
    scores = {"a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 4}
    kept = masks(scores, 0.5, min_keep=2)
    assert kept == {"a": [False, False, True, True], "b": [False, False, True, True], "c": [False, False, True, True]}


def test_more_than_a_layer_has_means_all_of_it():
    kept = masks({"tiny": [0.1, 0.2], "b": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}, 0.5, min_keep=3)
    assert kept == {"tiny": [True, True], "b": [False] * 3 + [True] * 3} or sum(kept["b"]) == 3
    assert kept["tiny"] == [True, True]


def test_the_default_keeps_as_many_weights_as_units_or_inputs():
    """2 units of 20 weights, 48 of 480 weights are kept: of a layer that would lose all its uniform share of 4."""
    generator = torch.Generator().manual_seed(0)
    scores = {"small": torch.rand(2, 20, generator=generator), "large": 1 + torch.rand(22, 20, generator=generator)}
    kept = Global()(scores, 0.9)
    assert int(kept["small"].sum()) == 4
    assert int(kept["large"].sum()) == 44
    kept = Global()(scores, 0.45)  # a share of 22, and 20 inputs
    assert int(kept["small"].sum()) == 20


def test_the_guard_keeps_the_largest_of_each_unit_first():
    """4 weights of 4 units, where the 4 largest all feed the first unit; a unit that is worth nothing gets none."""
    small = torch.tensor([[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0] * 4])
    kept = Global(min_keep=4)({"small": small, "large": 10 + torch.rand(8, 8)}, 0.5)
    assert kept["small"].int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_the_guard_knows_where_units_are_and_what_is_gone():
    """The same transposed, with the largest of a unit pruned before."""
    small = torch.tensor([[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0] * 4]).T
    masks = {"small": small != 2.0, "large": torch.ones(8, 8, dtype=torch.bool)}
    kept = Global(min_keep=4)({"small": small, "large": 10 + torch.rand(8, 8)}, 0.5, masks, {"small": 1, "large": 0})
    assert kept["small"].T.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


# Units


def test_units_by_the_mean_of_their_scores():
    scores = {"a": [[1.0, 9.0], [4.0, 4.0]], "b": [[6.0, 0.0], [7.0, 7.0]]}  # means 5, 4, 3, 7
    assert masks(scores, 0.5, granularity="unit") == {
        "a": [[True, True], [False, False]],
        "b": [[False] * 2, [True] * 2],
    }


def test_units_of_different_sizes_reach_the_nearest_number_of_weights():
    """Rows of 2 and of 6, 16 weights; means 1, 2, 3, 4 -> going cost 6, 8, 14, 16 weights."""
    scores = {"wide": [[1.0] * 6, [3.0] * 6], "narrow": [[2.0] * 2, [4.0] * 2]}

    def dropped(sparsity):
        kept = masks(scores, sparsity, granularity="unit", min_keep=0)
        return sum(not value for mask in kept.values() for row in mask for value in row)

    # Asked for 2, 3, 4 of 16: nearest of 0 and 6 (a tie stays below); 7: of 6 and 8; 11, 12: of 8 and 14; 15: of 14 and 16.
    asked = {2: 0, 3: 0, 4: 6, 6: 6, 7: 6, 8: 8, 11: 8, 12: 14, 14: 14, 15: 14}
    assert {weights: dropped(weights / 16) for weights in asked} == asked


def test_units_of_a_convolution_and_a_transposed_one():
    conv = torch.zeros(2, 3, 1, 1)
    conv[0] = 1.0
    transposed = torch.zeros(3, 2, 1, 1)
    transposed[:, 1] = 1.0
    kept = Global("unit")({"c": conv, "t": transposed}, 0.5, unit_dims={"t": 1})
    assert torch.equal(kept["c"], conv > 0)
    assert torch.equal(kept["t"], transposed > 0)


def test_a_unit_that_lost_single_weights_is_alive_and_one_that_lost_all_is_not():
    before = {"a": torch.tensor([[True, False], [False, False], [True, True], [True, True]])}
    kept = masks({"a": [[9.0, 0.0], [8.0, 8.0], [2.0, 2.0], [1.0, 1.0]]}, 0.5, masks=before, granularity="unit")
    assert [row[0] for row in kept["a"]] == [True, False, True, False]


def test_every_layer_keeps_a_unit_by_default():
    scores = {"small": [[1.0], [2.0]], "large": [[3.0], [4.0]]}
    assert masks(scores, 0.5, granularity="unit") == {"small": [[False], [True]], "large": [[False], [True]]}
