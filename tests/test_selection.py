"""What is prunable by default, and how to say otherwise."""

import pytest
import torch
from helpers import mlp
from torch import nn
from torch.nn.utils import parametrizations, parametrize, remove_weight_norm
from torch.nn.utils import prune as torch_prune
from torch.optim.swa_utils import AveragedModel

from sparsecomp import Magnitude, MaskStore, Selection, prune
from sparsecomp.selection import selection_table


def names(module, include=None, exclude=()):
    return [entry.name for entry in Selection(include, exclude).resolve(module)]


class Net(nn.Module):
    """A little of everything."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.encoder = nn.Sequential(nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3, 3))


ALL_OF_NET = [
    "scale",
    "emb.weight",
    "encoder.0.weight",
    "encoder.0.bias",
    "encoder.1.weight",
    "encoder.1.bias",
    "head.weight",
    "head.bias",
]


# Defaults


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(3, 2), ["weight"]),
        (nn.Linear(3, 2, bias=False), ["weight"]),
        (nn.Conv1d(2, 3, 2), ["weight"]),
        (nn.Conv2d(2, 4, 2, groups=2), ["weight"]),
        (nn.Conv3d(2, 3, 2), ["weight"]),
        (nn.ConvTranspose1d(2, 3, 2), ["weight"]),
        (nn.ConvTranspose2d(2, 3, 2), ["weight"]),
        (nn.ConvTranspose3d(2, 3, 2), ["weight"]),
        (nn.MultiheadAttention(8, 2), ["in_proj_weight", "out_proj.weight"]),
        (
            nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
            ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
        ),
        (nn.RNN(3, 2, num_layers=2), ["weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1"]),
        (nn.GRU(3, 2, bias=False), ["weight_ih_l0", "weight_hh_l0"]),
        (
            nn.LSTM(3, 4, bidirectional=True, proj_size=2),
            ["weight_ih_l0", "weight_hh_l0", "weight_ih_l0_reverse", "weight_hh_l0_reverse"],
        ),
        (nn.LSTMCell(3, 2), ["weight_ih", "weight_hh"]),
        (nn.GRUCell(3, 2), ["weight_ih", "weight_hh"]),
        (nn.RNNCell(3, 2), ["weight_ih", "weight_hh"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_default_of_each_layer(layer, expected):
    assert names(layer) == expected


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(3),
        nn.LayerNorm((3, 4)),  # its weight has two dimensions
        nn.GroupNorm(1, 3),
        nn.InstanceNorm1d(3, affine=True),
        nn.RMSNorm(3),
        nn.Embedding(4, 3),
        nn.EmbeddingBag(4, 3),
        nn.PReLU(3),
        nn.Bilinear(2, 2, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_never_by_default(layer):
    with pytest.raises(ValueError, match="the selection leaves nothing to prune in Sequential; its parameters are: 0"):
        names(nn.Sequential(layer))
    assert names(nn.Sequential(layer, nn.Linear(2, 2))) == ["1.weight"]


def test_frozen_parameters_are_left_out_and_can_be_named():
    module = mlp()
    module[0].weight.requires_grad_(False)
    assert names(module) == ["2.weight"]
    assert names(module, ["0.weight"]) == ["0.weight"]


def test_subclasses_of_layers_are_layers():
    class Special(nn.Linear):
        pass

    assert names(nn.Sequential(Special(2, 2))) == ["0.weight"]
    assert names(nn.Sequential(Special(2, 2), nn.Linear(2, 2)), ["Special"]) == ["0.weight"]


@pytest.mark.parametrize(
    ("layer", "attribute", "unit_dim", "bias"),
    [
        (nn.Linear(3, 2), "weight", 0, "bias"),
        (nn.Linear(3, 2, bias=False), "weight", 0, None),
        (nn.ConvTranspose2d(3, 2, 2), "weight", 1, "bias"),
        (nn.Conv2d(3, 2, 2), "weight", 0, "bias"),
        (nn.MultiheadAttention(8, 2), "in_proj_weight", 0, "in_proj_bias"),
        (nn.MultiheadAttention(8, 2), "out_proj.weight", 0, "bias"),
        (nn.MultiheadAttention(8, 2, kdim=4), "q_proj_weight", 0, None),
        (nn.LSTM(3, 2, bidirectional=True), "weight_hh_l0_reverse", 0, "bias_hh_l0_reverse"),
        (nn.LSTM(3, 2), "weight_ih_l0", 0, "bias_ih_l0"),
        (nn.GRUCell(3, 2), "weight_hh", 0, "bias_hh"),
    ],
)
def test_units_and_their_biases(layer, attribute, unit_dim, bias):
    (entry,) = (entry for entry in Selection().resolve(layer) if entry.name == attribute)
    assert (entry.unit_dim, entry.bias) == (unit_dim, bias)
    assert entry.parameter is dict(layer.named_parameters())[attribute]
    # Where units have a bias it has one entry a unit.
    biases = [dict(layer.named_parameters())[entry.bias_name]] if bias else []
    assert [b.shape for b in biases] == [entry.parameter.shape[unit_dim : unit_dim + 1]] * len(biases)


# Include and exclude


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (None, ["encoder.0.weight", "head.weight"]),
        ("head", ["head.weight"]),
        (["head*"], ["head.weight"]),
        (["head.bias"], ["head.bias"]),
        (["*.bias"], ["encoder.0.bias", "encoder.1.bias", "head.bias"]),
        (["encoder.*"], ["encoder.0.weight"]),
        (["encoder.1"], ["encoder.1.weight", "encoder.1.bias"]),
        (["encoder.?.weight"], ["encoder.0.weight"]),
        ("emb.weight", ["emb.weight"]),
        (["emb"], ["emb.weight"]),
        (["scale"], ["scale"]),
        (["*"], ["encoder.0.weight", "head.weight"]),
        (["Conv1d"], ["encoder.0.weight"]),
        (["torch.nn.Conv1d"], ["encoder.0.weight"]),
        ([nn.Conv1d], ["encoder.0.weight"]),
        (nn.Linear, ["head.weight"]),
        ([nn.Embedding, "head"], ["emb.weight", "head.weight"]),
        (["BatchNorm1d"], ["encoder.1.weight", "encoder.1.bias"]),
        ([nn.modules.batchnorm._NormBase], ["encoder.1.weight", "encoder.1.bias"]),
        (["head", "head.bias", "head"], ["head.weight", "head.bias"]),
    ],
)
def test_include(include, expected):
    assert names(Net(), include) == expected


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("head", ["encoder.0.weight"]),
        (["encoder*"], ["head.weight"]),
        (["Linear"], ["encoder.0.weight"]),
        ([nn.Conv1d], ["head.weight"]),
        (["head.bias"], ["encoder.0.weight", "head.weight"]),
        (["emb"], ["encoder.0.weight", "head.weight"]),
    ],
)
def test_exclude(exclude, expected):
    assert names(Net(), exclude=exclude) == expected


def test_parameters_themselves():
    net = Net()
    assert names(net, [net.emb.weight, net.head.weight]) == ["emb.weight", "head.weight"]
    assert names(net, exclude=net.head.weight) == ["encoder.0.weight"]
    assert names(net, include=["head", "emb"], exclude=[net.emb.weight]) == ["head.weight"]


def test_a_parameter_of_another_model():
    with pytest.raises(ValueError, match=r"`include` holds a parameter of shape \(3, 4\) that is not the model's"):
        names(Net(), [Net().head.weight])


def test_the_order_is_that_of_the_network():
    assert names(Net(), ["head", "scale", "encoder.*"]) == ["scale", "encoder.0.weight", "head.weight"]


def test_the_name_of_a_container_means_all_within():
    module = nn.ModuleDict({"body": nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()), "head": nn.Linear(2, 2)})
    assert names(module, ["body"]) == ["body.0.0.weight"]
    assert names(module, exclude=["body"]) == ["head.weight"]


@pytest.mark.parametrize(
    ("argument", "entry", "near"),
    [
        ("include", "encodr.0.weight", r"encoder\.0\.weight"),
        ("include", "hed", "head"),
        ("exclude", "Conv1", "Conv1d"),
        ("include", "linear", "Linear"),
        ("exclude", "zzz", r"BatchNorm1d, Conv1d, Embedding"),
        ("include", nn.LSTM, "near it are"),
    ],
)
def test_what_matches_nothing_is_named_with_near_names(argument, entry, near):
    wanted = entry if isinstance(entry, str) else entry.__name__
    with pytest.raises(
        ValueError, match=f"`{argument}` names what to .*'{wanted}' matches nothing in the model.*{near}"
    ):
        Selection(**{argument: [entry]}).resolve(Net())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            list(mlp().named_parameters()),
            r"got a tuple\. Of `named_parameters\(\)` give the names",
        ),
        (3, r"got 3 of type int"),
        ([1, 2], r"got 1 of type int"),
        ([mlp()[0]], r"got a Linear\. Of `named_parameters\(\)` give the names, of a module its name"),
        ([torch.ones(2)], r"of type Tensor"),
        ([int], r"got <class 'int'> of type type"),
        ([None], r"got None of type NoneType"),
    ],
    ids=["named_parameters", "int", "ints", "module", "tensor", "type", "none"],
)
@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_wrong_kinds(argument, value, message):
    with pytest.raises(
        TypeError, match=rf"(?s)`{argument}` takes a list whose entries are each a name pattern.*{message}"
    ):
        Selection(**{argument: value})


def test_the_generator_of_parameters_is_accepted():
    module = mlp()
    assert names(module, module.parameters()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with pytest.raises(TypeError, match=r"Of `named_parameters\(\)` give the names"):
        Selection(module.named_parameters())


def test_empty_selections():
    with pytest.raises(ValueError, match="`include` names the parameters to prune and must not be empty"):
        Selection(include=[])
    with pytest.raises(
        ValueError, match=r"leaves nothing to prune in Net; its parameters are: scale, emb\.weight.*Name some"
    ):
        names(Net(), exclude=["*"])
    with pytest.raises(TypeError, match=r"`module` is the network to prune and must be an nn.Module; got list"):
        Selection().resolve([nn.Linear(2, 2)])


def test_parameters_that_hold_no_mask():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.complex = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
            self.scalar = nn.Parameter(torch.tensor(1.0))

    with pytest.raises(TypeError, match=r"parameter 'complex' has dtype torch.complex64 and 2 dimensions"):
        names(Odd(), ["complex"])
    with pytest.raises(TypeError, match=r"parameter 'scalar' has dtype torch.float32 and 0 dimensions"):
        names(Odd(), ["scalar"])


# Shared, wrapped, lazy and averaged


def test_tied_weights_are_one():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    first, second = Selection().resolve(module)
    assert (first.name, first.aliases, second.name) == ("0.weight", ("2.weight",), "1.weight")
    assert MaskStore(module).weights.keys() == {"0.weight", "1.weight"}
    assert names(module, ["2.weight"]) == ["0.weight"]
    assert names(module, exclude=["2.weight"]) == ["1.weight"]


def test_a_module_used_twice_is_one():
    layer = nn.Linear(3, 3)
    module = nn.Sequential(layer, nn.ReLU(), layer)
    assert [(entry.name, entry.aliases) for entry in Selection().resolve(module)] == [("0.weight", ("2.weight",))]
    assert names(module, ["2"]) == ["0.weight"]


def test_a_linear_that_shares_its_weight_with_an_embedding_is_no_default():
    module = nn.ModuleDict({"head": nn.Linear(8, 10, bias=False), "emb": nn.Embedding(10, 8), "mid": nn.Linear(8, 8)})
    module["head"].weight = module["emb"].weight
    assert names(module) == ["mid.weight"]
    assert names(module, ["emb.weight"]) == ["head.weight"]
    assert names(module, ["head"]) == ["head.weight"]


WRAPPERS = {
    "new weight_norm": (parametrizations.weight_norm, "the parametrization WeightNorm", "remove_parametrizations"),
    "new spectral_norm": (
        parametrizations.spectral_norm,
        "the parametrization SpectralNorm",
        "remove_parametrizations",
    ),
    "orthogonal": (parametrizations.orthogonal, "the parametrization Orthogonal", "remove_parametrizations"),
    "old spectral_norm": (nn.utils.spectral_norm, "spectral_norm hook", "remove_spectral_norm"),
    "torch prune": (
        lambda layer: torch_prune.l1_unstructured(layer, "weight", 0.5),
        "a torch.nn.utils.prune",
        r"torch\.nn\.utils\.prune\.remove\(layer, 'weight'\)",
    ),
    "torch prune of a bias": (
        lambda layer: torch_prune.random_unstructured(layer, "bias", 0.5),
        "a torch.nn.utils.prune",
        r"torch\.nn\.utils\.prune\.remove\(layer, 'bias'\)",
    ),
}


def wrapped(wrap):
    module = nn.ModuleDict({"body": nn.Linear(4, 4), "last": nn.Linear(4, 3)})
    wrap(module["body"])
    return module


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_layer_whose_weight_is_computed_is_refused_with_what_to_do(case):
    wrap, how, remedy = WRAPPERS[case]
    message = (
        rf"layer 'body' \(Linear\) is under .*{how}.*{remedy}.*leave the layer out with Selection\(exclude=\['body'\]\)"
    )
    with pytest.raises(ValueError, match=message):
        names(wrapped(wrap))
    with pytest.raises(ValueError, match=message):
        names(wrapped(wrap), ["body"])
    with pytest.raises(ValueError, match=message):
        prune(wrapped(wrap), Magnitude(), 0.5)


@pytest.mark.parametrize("case", WRAPPERS)
@pytest.mark.parametrize("exclude", ["body", "body.weight", "bod*"])
def test_a_layer_whose_weight_is_computed_may_be_left_out(case, exclude):
    module = wrapped(WRAPPERS[case][0])
    assert names(module, exclude=[exclude]) == ["last.weight"]
    assert names(module, ["last"]) == ["last.weight"]


def old_weight_norm(layer):
    with pytest.warns(FutureWarning, match=r"weight_norm. is deprecated"):
        return nn.utils.weight_norm(layer)


def test_old_weight_norm_is_refused_and_its_remedy_works():
    module = wrapped(old_weight_norm)
    with pytest.raises(
        ValueError, match=r"'body' \(Linear\) is under a weight_norm hook.*remove_weight_norm\(layer\) first"
    ):
        names(module)
    assert names(module, exclude=["body"]) == ["last.weight"]
    remove_weight_norm(module["body"])
    assert sorted(names(module)) == ["body.weight", "last.weight"]


def test_the_remedies_work():
    module = wrapped(parametrizations.weight_norm)
    parametrize.remove_parametrizations(module["body"], "weight")
    assert names(module) == ["body.weight", "last.weight"]
    module = wrapped(WRAPPERS["torch prune"][0])
    torch_prune.remove(module["body"], "weight")
    assert sorted(names(module)) == ["body.weight", "last.weight"]
    module = wrapped(nn.utils.spectral_norm)
    nn.utils.remove_spectral_norm(module["body"])
    assert sorted(names(module)) == ["body.weight", "last.weight"]


def test_wrapped_convolutions_and_recurrent_layers_are_refused_too():
    lstm = nn.Sequential(nn.LSTM(3, 2))
    torch_prune.l1_unstructured(lstm[0], "weight_hh_l0", 0.5)
    with pytest.raises(ValueError, match=r"layer '0' \(LSTM\) is under .*prune\.remove\(layer, 'weight_hh_l0'\)"):
        names(lstm)
    conv = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(1, 1, 1)), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"layer '0' \(Conv2d\) is under the parametrization WeightNorm"):
        names(conv)
    assert names(conv, exclude=[nn.Conv2d]) == ["1.weight"]
    assert names(conv, exclude=["Conv2d"]) == ["1.weight"]


def test_lazy_layers_have_no_shape_before_the_first_forward_pass():
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(
        TypeError, match=r"parameter '0\.weight' of a lazy layer has no shape yet; run one forward pass first"
    ):
        names(module)
    module(torch.ones(1, 3))
    assert names(module) == ["0.weight", "2.weight"]


def test_copies_for_averaging_are_left_out():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.average = AveragedModel(self.net)

    module = Averaging()
    assert names(module) == ["net.0.weight", "net.2.weight"]
    assert names(module, ["*.weight"]) == ["net.0.weight", "net.2.weight"]


def test_all_names_are_known():
    """Every parameter of a network can be chosen by its full name."""
    for name, _ in Net().named_parameters():
        assert names(Net(), [name]) == [name]
    assert [name for name, _ in Net().named_parameters()] == ALL_OF_NET


def test_table():
    from sparsecomp._rendering import render

    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Conv2d(1, 5, 2))
    module[1].weight = module[0].weight
    text = render(selection_table(Selection().resolve(module), module))
    assert "0.weight = 1.weight" in text
    assert "5 x 1 x 2 x 2" in text
    assert "85.3% of all 34" in text
