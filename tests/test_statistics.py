"""Layer statistics: against loops over samples, outputs and inputs; nothing is left behind."""

import copy
import json
import subprocess
import sys
import weakref
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, clone
from test_moments import naive_rows
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from sparsecomp.data.batches import TensorBatches
from sparsecomp.probe import Probe
from sparsecomp.selection import Selection
from sparsecomp.statistics import LayerStatistics, collect


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def take(module, batches, gradients=False, signatures=False, include=None, exclude=(), probe=None, **options):
    selected = Selection(include, exclude).resolve(module)
    options = {"generator": seeded()} | options
    return collect(module, selected, batches, probe or Probe(), gradients=gradients, signatures=signatures, **options)


class Attention(nn.Module):
    """Linear projections around torch's fused attention."""

    def __init__(self, width=4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1))


def mlp(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(5, 6),
        nn.Tanh(),
        nn.Linear(6, outputs),
    ).eval()


def conv():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 2),
    ).eval()


def tokens():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), Attention(), nn.Flatten(), nn.Linear(12, 2)).eval()


NETWORKS = {
    "mlp": (mlp, (4,)),
    "conv": (conv, (2, 4, 4)),
    "attention": (tokens, (3, 2)),
}


def layers_of(module):
    return {f"{name}.weight": m for name, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def seen_by(module, x):
    """Name to (input, output) of each layer, on an untouched copy without in-place activations."""
    module = copy.deepcopy(module)
    for child in module.modules():
        if isinstance(child, nn.ReLU):
            child.inplace = False
    seen, hooks = {}, []
    for name, layer in layers_of(module).items():
        hooks.append(layer.register_forward_hook(lambda _, args, z, name=name: seen.update({name: (args[0], z)})))
    outputs = module(x)
    return outputs, seen


# What comes out


@pytest.mark.parametrize("network", NETWORKS)
def test_moments(network):
    make, shape = NETWORKS[network]
    module, x = make(), draw(7, *shape)
    found = take(module, x.split(3))
    _, seen = seen_by(module, x)
    assert list(found) == list(layers_of(module))
    for name, layer in layers_of(module).items():
        rows = naive_rows(layer, seen[name][0].detach())
        n = rows.shape[1]
        mean, second = rows.mean(1), rows.transpose(1, 2) @ rows / n
        centred = rows - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / n
        if rows.shape[0] == 1:
            mean, second, covariance = mean[0], second[0], covariance[0]
        statistics = found[name]
        assert statistics.count == n
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(statistics.mean, mean, **close)
        torch.testing.assert_close(statistics.second_moment, second, **close)
        torch.testing.assert_close(statistics.covariance, covariance, **close)
        z = seen[name][1].detach().double()
        z = z.flatten(0, -2) if isinstance(layer, nn.Linear) else z.transpose(0, 1).flatten(1).T
        torch.testing.assert_close(statistics.output_variance(layer.weight), z.var(0, correction=0), **close)
        assert statistics.output_gradient is statistics.input_signature is statistics.output_signature is None


def naive_credits(module, x):
    """Per sample and output a backward pass; squared per position, then summed."""
    credits = {name: torch.zeros(len(layer.weight)) for name, layer in layers_of(module).items()}
    for sample in x:
        outputs, seen = seen_by(module, sample[None])
        for o in outputs.flatten():
            for name, (_, z) in seen.items():
                g = torch.autograd.grad(o, z, retain_graph=True)[0]
                g = g.flatten(0, -2) if isinstance(layers_of(module)[name], nn.Linear) else g[0].flatten(1).T
                credits[name] += g.square().sum(0)
    return {name: (total / len(x)).double() for name, total in credits.items()}


def one_output(module):
    return nn.Sequential(*module[:-1], nn.Linear(module[-1].in_features, 1)).eval()


@pytest.mark.parametrize("network", NETWORKS)
def test_credits_are_exact_with_one_output(network):
    make, shape = NETWORKS[network]
    module, x = one_output(make()), draw(6, *shape)
    found = take(module, x.split(4), gradients=True)
    for name, expected in naive_credits(module, x).items():
        assert expected.any()
        torch.testing.assert_close(found[name].output_gradient, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("network", NETWORKS)
def test_credits_of_several_outputs_are_right_on_average(network):
    make, shape = NETWORKS[network]
    module, x = make(), draw(4, *shape)
    # The same samples again and again: signs are drawn anew, and their mean comes near.
    found = take(module, [x] * 300, gradients=True, probe=Probe(300))
    for name, expected in naive_credits(module, x).items():
        error = (found[name].output_gradient - expected).norm() / expected.norm()
        assert 0 < error < 0.08 or name == list(found)[-1], name


def test_signs_come_from_the_generator_alone():
    x = draw(6, 4)
    first = take(mlp(), [x], gradients=True)["0.weight"].output_gradient
    torch.rand(3)
    same = take(mlp(), [x], gradients=True)["0.weight"].output_gradient
    other = take(mlp(), [x], gradients=True, generator=seeded(1))["0.weight"].output_gradient
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("network", NETWORKS)
def test_signatures(network):
    make, shape = NETWORKS[network]
    module, x = make().double(), draw(5, *shape).double()
    found = take(module, x.split(3), signatures=True)
    variance = x.flatten(1).var(0, correction=0)

    for name, layer in layers_of(module).items():

        def into_and_out(sample, name=name):
            _, seen = seen_by(module, sample[None])
            return seen[name]

        jacobians = [torch.autograd.functional.jacobian(into_and_out, sample) for sample in x]
        squares = torch.stack([j.flatten(-len(shape)) for j, _ in jacobians]).square()[
            :, 0
        ]  # (n, *layer input, inputs)
        # Each network input is a batch of "images" to the naive unfold.
        squares = squares.movedim(-1, 1).flatten(0, 1)
        rows = naive_rows(layer, squares)
        groups, _, d = rows.shape
        rows = rows.reshape(groups, len(x), len(variance), -1, d)
        n = len(x) * rows.shape[3]
        expected = rows.sum((1, 3)).transpose(1, 2) / n * variance
        expected = expected[0] if groups == 1 else expected
        assert expected.any()
        assert found[name].count == n
        torch.testing.assert_close(found[name].input_signature, expected, rtol=1e-9, atol=1e-12)

        out = torch.stack([j.flatten(-len(shape)) for _, j in jacobians]).square()[:, 0]
        out = out.flatten(0, -3) if isinstance(layer, nn.Linear) else out.transpose(0, 1).flatten(1, -2).transpose(0, 1)
        torch.testing.assert_close(found[name].output_signature, out.sum(0) / n * variance, rtol=1e-9, atol=1e-12)


def test_the_reference_network():
    reference = np.load(Path(__file__).parent / "data" / "sp_reference.npz", allow_pickle=False)
    functions = {"tanh": torch.tanh, "sin": torch.sin, "gauss": lambda z: 2 * torch.exp(-z * z) - 1, "id": lambda z: z}
    activations = [functions[name] for name in json.loads(str(reference["activations"]))]

    class Mixed(nn.Module):
        def forward(self, z):
            return torch.stack([f(column) for f, column in zip(activations, z.T, strict=True)], dim=1)

    stack = []
    for index in range(4):
        weight, bias = (torch.tensor(reference[f"{kind}_{index}"]) for kind in ("weight", "bias"))
        layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        layer.weight.data, layer.bias.data = weight, bias
        stack += [layer, Mixed()]
    module = nn.Sequential(*stack[:-1])
    found = list(take(module, torch.tensor(reference["X"]).split(100), gradients=True, signatures=True).values())

    def shares(signature):
        return signature / signature.sum(1, keepdim=True)

    for index, statistics in enumerate(found):
        credit = statistics.output_gradient * statistics.output_variance(module[2 * index].weight)
        torch.testing.assert_close(credit, torch.tensor(reference[f"unit_credit_{index}"]), rtol=1e-6, atol=0)
        units = found[index + 1].input_signature if index < 3 else statistics.output_signature
        overlap = torch.minimum(shares(units)[:, None], shares(statistics.input_signature)[None]).sum(-1)
        torch.testing.assert_close(overlap, torch.tensor(reference[f"overlap_{index}"]), rtol=1e-6, atol=0)


def test_half_precision():
    x = draw(64, 4)
    exact = take(mlp(1), [x], gradients=True, signatures=True)
    found = take(mlp(1).bfloat16(), [x], gradients=True, signatures=True)
    for name, statistics in found.items():
        for field in ("mean", "second_moment", "output_gradient", "input_signature"):
            value = getattr(statistics, field)
            assert value.dtype is torch.float64
            torch.testing.assert_close(value, getattr(exact[name], field), rtol=0.1, atol=0.02)


def test_only_so_many_batches_are_read():
    read = []

    def batches():
        for seed in range(9):
            read.append(seed)
            yield draw(2, 4, seed=seed)

    assert take(mlp(), batches(), probe=Probe(3))["0.weight"].count == 6
    assert read == [0, 1, 2]


def test_no_batch_is_kept():
    # All outputs of layers of earlier batches are gone by the time of the next.
    module, alive = mlp(), []
    module[4].register_forward_hook(lambda _, args, z: alive.append(weakref.ref(z)))

    def batches():
        for seed in range(4):
            assert [ref() for ref in alive] == [None] * len(alive)
            yield draw(2, 4, seed=seed)

    take(module, batches(), gradients=True, signatures=True)
    assert len(alive) == 4 * (1 + 4)


# Uses of layers


def test_uses_of_a_layer_are_added():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.head(torch.tanh(self.cell(torch.tanh(self.cell(x)))))

    module, x = Recurrent(), draw(5, 3)
    found = take(module, [x], gradients=True, include=["cell"])["cell.weight"]
    first = module.cell(x)
    second = module.cell(torch.tanh(first))
    out = module.head(torch.tanh(second)).sum()
    rows = torch.cat([x, torch.tanh(first)]).double()
    assert found.count == 10
    torch.testing.assert_close(found.second_moment, rows.T @ rows / 10, rtol=1e-5, atol=1e-6)
    expected = sum(g.square().sum(0) for g in torch.autograd.grad(out, [first, second])) / 5
    torch.testing.assert_close(found.output_gradient, expected.double(), rtol=1e-5, atol=1e-7)


def test_uses_of_a_tied_weight_are_added():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    x = draw(5, 3)
    found = take(module, [x], gradients=True)
    assert list(found) == ["0.weight"]
    rows = torch.cat([x, torch.tanh(module[0](x))]).double()
    torch.testing.assert_close(found["0.weight"].mean, rows.mean(0), rtol=1e-5, atol=1e-6)


def test_a_frozen_network_has_credits_before_an_inplace_activation():
    module, x = one_output(conv()), draw(3, 2, 4, 4)
    expected = take(module, [x], gradients=True)
    selected = Selection().resolve(module)
    module.requires_grad_(False)

    class Plain(Probe):
        def outputs(self, module, inputs, batch):
            return module(inputs.detach())

    found = collect(module, selected, [x], Plain(), gradients=True, signatures=False, generator=seeded())
    for name, statistics in found.items():
        assert statistics.output_gradient.any()
        assert torch.equal(statistics.output_gradient, expected[name].output_gradient)
    assert not any(p.requires_grad for p in module.parameters())


def test_what_does_not_reach_the_output_has_no_credit():
    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.side = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            self.side(x)
            return self.main(x)

    found = take(Side(), [draw(3, 2)], gradients=True)
    assert found["main.weight"].output_gradient.tolist() == [1]
    assert found["side.weight"].output_gradient.tolist() == [0]


def test_activation_checkpointing_counts_once():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(1)

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    x = draw(5, 4)
    found, plain = (take(m, [x], gradients=True) for m in (Checkpointed(), mlp(1)))
    for name, statistics in plain.items():
        assert found[f"net.{name}"].count == statistics.count
        torch.testing.assert_close(found[f"net.{name}"].output_gradient, statistics.output_gradient)


def test_layers_inside_torchs_transformer_layer_are_seen():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    found = take(nn.Sequential(layer), [draw(3, 5, 4)], include=["0.linear*"])
    assert [statistics.count for statistics in found.values()] == [15, 15]


def test_inputs_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            return self.layer(input=x)

    assert take(Keyword(), [torch.ones(3, 2)])["layer.weight"].mean.tolist() == [1, 1]


# Nothing is left behind


def everything(module):
    return {
        "state": clone(module.state_dict()),
        "modes": [child.training for child in module.modules()],
        "flags": [p.requires_grad for p in module.parameters()],
        "grads": [p.grad if p.grad is None else p.grad.clone() for p in module.parameters()],
        "hooks": [len(child._forward_hooks) for child in module.modules()],
        "random": torch.get_rng_state(),
    }


def used():
    module = mlp()
    module.train()
    module[3].eval()
    module[0].weight.grad = torch.ones(5, 4)
    module[6].bias.requires_grad_(False)
    return module


def test_the_module_is_as_before():
    module = used()
    before = everything(module)
    take(module, [draw(4, 4)] * 2, gradients=True, signatures=True)
    assert_same(everything(module), before)


def test_the_module_is_as_before_after_an_error():
    module = used()
    before = everything(module)
    loader = TensorBatches(draw(8, 4), batch_size=2)

    def broken(x):
        raise ZeroDivisionError

    module[5].forward = broken
    with pytest.raises(ZeroDivisionError):
        take(module, loader, gradients=True, signatures=True)
    assert_same(everything(module), before)


def test_a_resumable_loader_keeps_its_place():
    loader = TensorBatches(torch.arange(40.0).reshape(10, 4), batch_size=2, shuffle=True)
    expected = [x.tolist() for (x,) in copy.copy(loader)]
    iterator = iter(loader)
    got = [next(iterator)[0].tolist()]
    place = loader.state_dict()
    take(mlp(), loader, probe=Probe(3))
    assert loader.state_dict() == place
    got += [x.tolist() for (x,) in iterator]
    assert got == expected


def test_a_resume_of_a_loader_is_not_used_up():
    loader = TensorBatches(draw(10, 4), batch_size=2)
    loader.load_state_dict({"seed": 0, "epoch": 0, "done": 3})
    take(mlp(), loader, probe=Probe(1))
    assert len(list(loader)) == 2


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_shuffled_data_loader_has_the_same_next_epoch(own_generator):
    def epochs(look):
        torch.manual_seed(0)
        generator = seeded(3) if own_generator else None
        loader = DataLoader(TensorDataset(torch.arange(48.0).reshape(12, 4)), 3, shuffle=True, generator=generator)
        first = [x.tolist() for (x,) in loader]
        if look:
            take(mlp_, loader, probe=Probe(2))
        return first, [x.tolist() for (x,) in loader]

    mlp_ = mlp()
    assert epochs(look=True) == epochs(look=False)


# Errors


@pytest.mark.parametrize(
    ("layer", "include", "message"),
    [
        (
            nn.MultiheadAttention(4, 2),
            None,
            r"'in_proj_weight', which nn.MultiheadAttention does not show; build the .*Lin",
        ),
        (
            nn.MultiheadAttention(4, 2),
            ["out_proj"],
            r"'out_proj.weight', which nn.MultiheadAttention .*exclude=\['out_pr",
        ),
        (nn.LSTM(4, 2), None, r"'weight_ih_l0', which the fused LSTM does not show; build the cell of nn.Linear"),
        (nn.ConvTranspose2d(2, 2, 2), None, "weights of Linear and Conv1d-3d layers; got 'weight' of ConvTranspose2d"),
        (nn.Linear(4, 2), ["bias"], "got 'bias' of Linear"),
    ],
)
def test_layers_that_cannot_be_seen(layer, include, message):
    with pytest.raises(TypeError, match=message):
        take(layer, [draw(2, 4)], include=include)


def test_an_embedding_tied_to_a_linear_is_refused():
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    module[1].weight = module[0].weight
    with pytest.raises(TypeError, match=r"got '0.weight' of Embedding"):
        take(module, [torch.tensor([1])], include=["0.weight"])


def test_a_layer_that_is_never_reached():
    module = mlp()
    module.add_module("spare", nn.Linear(3, 3))
    module.forward = module[:7].__call__
    with pytest.raises(ValueError, match=r"layer 'spare.weight' was never reached.*exclude=\['spare.weight'\]"):
        take(module, [draw(2, 4)], gradients=True)
    assert "0.weight" in take(module, [draw(2, 4)], gradients=True, exclude=["spare"])


def test_no_batches():
    with pytest.raises(ValueError, match="`batches` yields what statistics are taken from and was empty"):
        take(mlp(), [])


def test_outputs_without_credits():
    class Detached(Probe):
        def outputs(self, module, inputs, batch):
            return module(inputs).detach()

    class Scalar(Probe):
        def outputs(self, module, inputs, batch):
            return module(inputs).sum()

    with pytest.raises(ValueError, match="the output of the network is not connected to its layers"):
        take(mlp(), [draw(2, 4)], gradients=True, probe=Detached())
    with pytest.raises(ValueError, match=r"must be \(n, ...\), a row per sample; got a scalar"):
        take(mlp(), [draw(2, 4)], probe=Scalar())


def test_a_layer_under_no_grad():
    module = mlp()
    module.forward = torch.no_grad()(module.forward)
    with pytest.raises(ValueError, match=r"layer '0.weight' runs under torch.no_grad"):
        take(module, [draw(2, 4)], gradients=True)


def test_signatures_that_are_refused():
    wide = nn.Linear(65, 2)
    with pytest.raises(ValueError, match=r"65 inputs are more than `max_inputs` = 64; collect without signatures"):
        take(wide, [draw(2, 65)], signatures=True)
    assert take(wide, [draw(2, 65)], signatures=True, max_inputs=65)["weight"].input_signature.shape == (65, 65)
    words = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"must be floating point; got torch.int64"):
        take(words, [torch.tensor([1])], signatures=True)
    with pytest.raises(ValueError, match="same number of network inputs in every batch; got 9 after 6"):
        take(nn.Linear(3, 1), [draw(2, 2, 3), draw(2, 3, 3)], signatures=True)
    with pytest.raises(ValueError, match="`max_inputs` is the largest number"):
        take(wide, [draw(2, 65)], signatures=True, max_inputs=0)


def test_nothing_selected():
    assert collect(mlp(), [], [], Probe(), gradients=True, signatures=True, generator=seeded()) == {}


# Several ranks


def work_of_a_rank(folder, rank):
    """Statistics of every other sample, and what comes where one rank has no batches, or the other wrong ones."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        x = draw(12, 4)
        found = take(mlp(1), x[rank::2].split(3), gradients=True, signatures=True)
        errors = []
        for batches in ([x] if rank else [], [x[:, :3]] if rank else [x]):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                take(mlp(1), batches)
            errors.append(f"{caught.typename}: {caught.value}")
    finally:
        dist.destroy_process_group()
    return {name: vars(statistics) for name, statistics in found.items()}, errors


def test_ranks_add_up_and_fail_together(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[2]); torch.set_num_threads(1); import test_statistics as tests; "
        "torch.save(tests.work_of_a_rank(sys.argv[1], 1), sys.argv[1] + '/1.pt')"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        ours = work_of_a_rank(tmp_path, 0)
        said = other.communicate(timeout=60)[0]
    finally:
        other.kill()
    assert other.returncode == 0, said
    expected = take(mlp(1), draw(12, 4).split(6), gradients=True, signatures=True)
    for found, _ in (ours, theirs := torch.load(tmp_path / "1.pt", weights_only=True)):
        assert list(found) == list(expected)
        for name, values in found.items():
            assert list(values) == [field.name for field in fields(LayerStatistics)]
            for field, value in values.items():
                torch.testing.assert_close(value, getattr(expected[name], field), rtol=1e-6, atol=1e-6)
    elsewhere = "RuntimeError: layer statistics failed on another rank"
    for errors, beginnings in (
        (ours[1], ["ValueError: `batches` yields", elsewhere]),
        (theirs[1], [elsewhere, "RuntimeError: mat1 and mat2"]),
    ):
        assert [error.startswith(begin) for error, begin in zip(errors, beginnings, strict=True)] == [True, True]
