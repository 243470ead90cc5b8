"""What to prune is said by name, glob, type or parameter; else an error says how.

https://github.com/pytorch/tutorials/issues/1054
"""

import pytest
import torch
from helpers import Lit, loader, trainer
from torch import nn

from sparsecomp import Magnitude, OneShot, Pruning, Selection, prune

ALL = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


def named():
    net = nn.Sequential()
    net.add_module("encoder", nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)))
    net.add_module("head", nn.Linear(8, 2))
    return net


def chosen(net, **options):
    return [entry.name for entry in Selection(**options).resolve(net)]


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (None, ["0.weight", "3.weight"]),
        ("0", ["0.weight"]),  # module names
        (["0", "3"], ["0.weight", "3.weight"]),
        (["3"], ["3.weight"]),
        (["0.weight"], ["0.weight"]),  # parameter names
        (["1.weight"], ["1.weight"]),
        (["0.bias", "0.weight"], ["0.weight", "0.bias"]),
        (["*.weight"], ["0.weight", "3.weight"]),  # globs
        (["*.bias"], ["0.bias", "1.bias", "3.bias"]),
        (["*"], ["0.weight", "3.weight"]),
        (["[03].weight"], ["0.weight", "3.weight"]),
        (["Conv2d"], ["0.weight"]),  # types
        ([nn.Conv2d], ["0.weight"]),
        (nn.Linear, ["3.weight"]),
        (["torch.nn.Linear"], ["3.weight"]),
        ([nn.Conv2d, "Linear"], ["0.weight", "3.weight"]),
        ([nn.BatchNorm2d], ["1.weight", "1.bias"]),
    ],
)
def test_names_globs_and_types(include, expected):
    assert chosen(build(), include=include) == expected


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("0", ["1.bias", "3.weight"]),
        (["3.weight"], ["0.weight", "1.bias"]),
        (["*.weight"], ["1.bias"]),
        (["*.bias"], ["0.weight", "3.weight"]),
        (nn.Conv2d, ["1.bias", "3.weight"]),
        (["Linear", nn.Conv2d], ["1.bias"]),
        ((), ["0.weight", "1.bias", "3.weight"]),
    ],
)
def test_the_same_forms_leave_out(exclude, expected):
    assert chosen(build(), include=["0.weight", "3.weight", "1.bias"], exclude=exclude) == expected


def test_globs_on_names_of_modules():
    net = named()
    assert chosen(net) == ["encoder.0.weight", "encoder.2.weight", "head.weight"]
    assert chosen(net, include=["encoder.*"]) == ["encoder.0.weight", "encoder.2.weight"]
    assert chosen(net, exclude=["encoder.*"]) == ["head.weight"]
    assert chosen(net, include=["enc*", nn.Linear], exclude=["*.2"]) == ["encoder.0.weight", "head.weight"]


@pytest.mark.parametrize(
    "pick",
    [
        lambda net: net.parameters(),  # a generator, as in the report
        lambda net: list(net.parameters()),
        lambda net: tuple(net.parameters()),
        lambda net: dict(net.named_parameters()),  # its keys are names
    ],
)
def test_all_parameters_handed_over(pick):
    net = build()
    assert chosen(net, include=pick(net)) == ALL


def test_single_parameters():
    net = build()
    assert chosen(net, include=net[3].weight) == ["3.weight"]
    assert chosen(net, include=[net[1].weight, "0"]) == ["0.weight", "1.weight"]
    assert chosen(net, exclude=net[0].parameters()) == ["3.weight"]
    selection = Selection(include=net.parameters())
    assert len(selection.resolve(net)) == len(selection.resolve(net)) == 6  # a generator is read once


def test_the_same_in_a_training():
    module = Lit(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)))
    pruner = Pruning(Magnitude(), OneShot(0.5, at=1), selection=Selection(include=module.net[2].parameters()))
    trainer(pruner, max_epochs=2).fit(module, loader())
    assert list(pruner.masks) == ["net.2.weight", "net.2.bias"]
    assert pruner.sparsity == 0.5


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("wrong", "came"),
    [
        (lambda net: net.named_parameters(), "tuple"),
        (lambda net: list(net.named_parameters()), "tuple"),
        (lambda net: [(net[0], "weight")], "tuple"),  # the form torch.nn.utils.prune takes
        (lambda net: net, "Sequential|Conv2d"),
        (lambda net: [net[0]], "Conv2d"),
        (lambda net: 3, "int"),
        (lambda net: [None], "NoneType"),
        (lambda net: [torch.ones(2)], "Tensor"),
        (lambda net: [int], "type"),
    ],
)
def test_another_kind_says_what_is_accepted(argument, wrong, came):
    with pytest.raises(
        TypeError,
        match=rf"(?s)`{argument}` takes a list whose entries are each a name pattern such as .*, a layer type such as .*, "
        rf"or a parameter of the model; got .*\b({came})\b",
    ):
        Selection(**{argument: wrong(build())})


def test_pairs_and_modules_get_a_hint():
    with pytest.raises(TypeError, match=r"Of `named_parameters\(\)` give the names, of a module its name"):
        Selection(include=build().named_parameters())


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("3.wieght", r"3\.weight"),
        ("Conv2D", "Conv2d"),
        ("torch.nn.Linaer", "Linear"),
        ("linear", "Linear"),
        (nn.Conv1d, "Conv2d"),
    ],
)
def test_a_name_that_matches_nothing_lists_the_nearest(argument, wrong, near):
    with pytest.raises(
        ValueError, match=rf"`{argument}` names what to .* matches nothing in the model; near it are: .*{near}"
    ):
        Selection(**{argument: [wrong]}).resolve(build())


def test_parameters_of_another_model():
    with pytest.raises(ValueError, match=r"a parameter of shape \(4, 3, 3, 3\) that is not the model's"):
        Selection(include=build().parameters()).resolve(build())


@pytest.mark.parametrize("wrong", [lambda net: net.parameters(), lambda net: ["0"], lambda net: nn.Linear])
def test_in_place_of_a_selection(wrong):
    net = build()
    for make in (
        lambda: prune(net, Magnitude(), 0.5, selection=wrong(net)),
        lambda: Pruning(Magnitude(), OneShot(0.5, at=1), selection=wrong(net)),
    ):
        with pytest.raises(
            TypeError, match=r"`selection` is what is prunable and must be a Selection, such as Selection\("
        ):
            make()


@pytest.mark.parametrize("wrong", [lambda net: net.parameters(), lambda net: net.state_dict(), list])
def test_in_place_of_the_model(wrong):
    with pytest.raises(TypeError, match=r"is the network to prune and must be an nn\.Module; got"):
        prune(wrong(build()), Magnitude(), 0.5)
