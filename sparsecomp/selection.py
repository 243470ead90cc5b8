"""Which parameters are prunable: layer types, name patterns, tied weights once."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rich.table import Table
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from sparsecomp.averaging import averaged_prefixes

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_DEFAULT_LAYERS = (nn.Linear, _ConvNd, nn.MultiheadAttention, *_RECURRENT)
_ATTENTION_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_ACCEPTED = (
    "a name pattern such as 'encoder.*' or 'head.weight', a layer type such as 'Conv2d' or nn.Conv2d, or a parameter of "
    "the model"
)


@dataclass(frozen=True)
class PrunableParameter:
    """One parameter that masks may be put on, and where it lives.

    Attributes:
        name: Fully qualified name; of a tied weight the first one.
        owner: The module that holds it.
        attribute: Its name within `owner`.
        layer: Class name of `owner`, for tables.
        unit_dim: Dimension that counts output units (rows, channels).
        bias: Attribute name in `owner` of the bias of those units, or None.
        aliases: Further names of the same tensor.
        holders: All modules that hold the tensor, `owner` first.
    """

    name: str
    owner: nn.Module
    attribute: str
    layer: str
    unit_dim: int
    bias: str | None
    aliases: tuple[str, ...]
    holders: tuple[nn.Module, ...]

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor as it is now; a load with `assign=True` may have replaced it."""
        parameter = self.owner._parameters[self.attribute]
        if parameter is None:
            raise RuntimeError(f"parameter {self.name!r} is gone from its layer; build the masks anew.")
        return parameter

    @property
    def bias_name(self) -> str | None:
        """Fully qualified name of the bias."""
        return None if self.bias is None else self.name[: -len(self.attribute)] + self.bias


@dataclass(frozen=True)
class Selection:
    """Chooses the parameters to prune.

    By default: `weight` of Linear, Conv1d-3d and transposed convolutions, `in_proj_weight` and `out_proj.weight` of
    MultiheadAttention, `weight_ih_*` and `weight_hh_*` of LSTM, GRU and RNN. Never by default: norms, biases,
    embeddings (also where a Linear shares their weight), anything one-dimensional, frozen parameters.

    Args:
        include: What to prune instead of the default; each entry is a name pattern (as in fnmatch, on parameter or
            module names), a layer type (a class or its name), or a parameter of the model. A pattern chooses among the
            parameters of the default; if it matches none of these, or is a full parameter name, it chooses among all
            others, so that `"*.bias"` means biases and `"emb.weight"` an embedding.
        exclude: What to leave out, in the same forms.

    Raises:
        TypeError: If an entry is of another kind.
        ValueError: On `resolve`, if an entry matches nothing or nothing is left.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    >>> [p.name for p in Selection().resolve(model)]
    ['0.weight', '3.weight']
    >>> [p.name for p in Selection(include=["Linear", "0.bias"]).resolve(model)]
    ['0.bias', '3.weight']
    """

    include: Sequence[str | type | nn.Parameter] | None = None
    exclude: Sequence[str | type | nn.Parameter] = ()

    def __post_init__(self) -> None:
        if self.include is not None:
            object.__setattr__(self, "include", _entries("include", self.include))
            if not self.include:
                raise ValueError(
                    "`include` names the parameters to prune and must not be empty; leave it out for the default."
                )
        object.__setattr__(self, "exclude", _entries("exclude", self.exclude))

    def resolve(self, module: nn.Module) -> list[PrunableParameter]:
        """Return the chosen parameters of `module` in the order of `named_parameters`.

        Raises:
            TypeError: If `module` is no nn.Module, or a chosen parameter cannot hold a mask.
            ValueError: If an entry matches nothing, nothing is chosen, or a chosen layer is parametrized.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` is the network to prune and must be an nn.Module; got {type(module).__name__}.")
        candidates = list(_candidates(module))
        wrapped = list(_wrapped_layers(module))
        excluded = {c.name for entry in self.exclude for c in self._matches("exclude", entry, candidates, wrapped)}
        if self.include is None:
            chosen = {c.name for c in candidates if c.by_default}
        else:
            chosen = {c.name for entry in self.include for c in self._matches("include", entry, candidates, wrapped)}
        self._refuse_wrapped(wrapped)
        kept = [c for c in candidates if c.name in chosen - excluded]
        if not kept:
            raise ValueError(
                f"the selection leaves nothing to prune in {type(module).__name__}; its parameters are: "
                f"{_listed(name for c in candidates for name in c.names)}. Name some in `include`."
            )
        return [c.prunable() for c in kept]

    def _matches(
        self, argument: str, entry: str | type | nn.Parameter, candidates: "list[_Candidate]", wrapped: "list[_Wrapped]"
    ) -> "list[_Candidate]":
        if isinstance(entry, nn.Parameter):
            found = [c for c in candidates if c.parameter is entry]
            if not found:
                raise ValueError(
                    f"`{argument}` holds a parameter of shape {tuple(entry.shape)} that is not the model's."
                )
            return found
        if isinstance(entry, type):
            of_type = [c for c in candidates if any(isinstance(owner, entry) for owner in c.owners)]
        else:
            of_type = [c for c in candidates if c.is_called(entry)]
            exact = [c for c in of_type if entry in c.names]
            if exact:
                return exact
        if not of_type and not any(w.matches(entry) for w in wrapped):
            wanted = entry.__name__ if isinstance(entry, type) else entry
            known = sorted({name for c in candidates for name in (*c.names, *c.module_names, *c.containers, *c.layers)})
            near = difflib.get_close_matches(wanted, known, n=5, cutoff=0.4) or known
            raise ValueError(
                f"`{argument}` names what to {'prune' if argument == 'include' else 'leave out'}, and {wanted!r} matches "
                f"nothing in the model; near it are: {_listed(near)}. Accepted is {_ACCEPTED}."
            )
        return [c for c in of_type if c.by_default] or of_type

    def _refuse_wrapped(self, wrapped: "list[_Wrapped]") -> None:
        for layer in wrapped:
            named = self.include is None or any(layer.matches(entry) for entry in self.include)
            if named and not any(layer.matches(entry) for entry in self.exclude):
                raise ValueError(
                    f"layer {layer.name!r} ({layer.kind}) is under {layer.wrapper}: the weight it uses is computed from "
                    f"other tensors, so that a mask would not hold. {layer.remedy}, or leave the layer out with "
                    f"Selection(exclude=[{layer.name!r}])."
                )


def selection_table(selected: Sequence[PrunableParameter], module: nn.Module) -> Table:
    """A rich table of what is prunable and what share of all parameters that is."""
    total = sum(p.numel() for p in module.parameters())
    table = Table(title="Parameters to prune", title_justify="left")
    for heading in ("parameter", "layer", "shape"):
        table.add_column(heading)
    table.add_column("weights", justify="right")
    for entry in selected:
        name = " = ".join((entry.name, *entry.aliases))
        parameter = entry.parameter
        table.add_row(name, entry.layer, " x ".join(map(str, parameter.shape)), f"{parameter.numel():,}")
    count = sum(entry.parameter.numel() for entry in selected)
    table.add_section()
    table.add_row("in all", "", f"{count / total:.1%} of all {total:,}", f"{count:,}")
    return table


@dataclass(frozen=True)
class _Candidate:
    """A parameter with all of its names and owners."""

    names: tuple[str, ...]
    owners: tuple[nn.Module, ...]
    module_names: tuple[str, ...]
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(type(owner).__name__ for owner in self.owners)

    @property
    def containers(self) -> set[str]:
        """Names of the modules around the owners: all that is in `encoder` is meant by that name."""
        parts = [name.split(".") for name in self.module_names]
        return {".".join(path[:depth]) for path in parts for depth in range(1, len(path))}

    @property
    def by_default(self) -> bool:
        # Every owner must agree: a Linear that shares its weight with an embedding would prune the embedding.
        return self.parameter.requires_grad and all(
            _is_default(owner, name.rpartition(".")[2], self.parameter)
            for owner, name in zip(self.owners, self.names, strict=True)
        )

    def is_called(self, pattern: str) -> bool:
        called = (*self.names, *self.module_names, *self.containers)
        types = (t for owner in self.owners for t in (type(owner).__name__, _path(type(owner))))
        return pattern in types or any(fnmatchcase(name, pattern) for name in called)

    def prunable(self) -> PrunableParameter:
        parameter, owner, attribute = self.parameter, self.owners[0], self.name.rpartition(".")[2]
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TypeError(f"parameter {self.name!r} of a lazy layer has no shape yet; run one forward pass first.")
        if not parameter.is_floating_point() or parameter.dim() == 0:
            raise TypeError(
                f"parameter {self.name!r} has dtype {parameter.dtype} and {parameter.dim()} dimensions; masks need a real "
                "floating-point tensor with at least one dimension. Leave it out with `exclude`."
            )
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
            raise TypeError(
                f"parameter {self.name!r} belongs to an embedding with sparse=True, whose sparse gradients hold no mask; "
                "use sparse=False or leave it out."
            )
        return PrunableParameter(
            name=self.name,
            owner=owner,
            attribute=attribute,
            layer=type(owner).__name__,
            unit_dim=1 if isinstance(owner, _ConvTransposeNd) and attribute == "weight" else 0,
            bias=_bias_of(owner, attribute),
            aliases=self.names[1:],
            holders=self.owners,
        )


@dataclass(frozen=True)
class _Wrapped:
    """A layer whose weight is not a parameter but computed from some."""

    name: str
    kind: str
    class_: type[nn.Module]
    wrapper: str
    remedy: str

    def matches(self, entry: str | type | nn.Parameter) -> bool:
        if isinstance(entry, nn.Parameter):
            return False
        if isinstance(entry, type):
            return issubclass(self.class_, entry)
        called = (self.name, f"{self.name}.weight", f"{self.name}.bias")
        return entry in {self.kind, _path(self.class_)} or any(fnmatchcase(name, entry) for name in called)


def _entries(argument: str, value: Any) -> tuple[str | type | nn.Parameter, ...]:
    if isinstance(value, str | type | nn.Parameter):
        value = (value,)
    if isinstance(value, Iterable):
        entries = tuple(value)
        bad = [e for e in entries if not isinstance(e, str | nn.Parameter) and not _is_layer_type(e)]
        if not bad:
            return entries
        value = bad[0]
    hint, got = "", f"{value!r} of type {type(value).__name__}"
    if isinstance(value, tuple | nn.Module):
        got = f"a {type(value).__name__}"
        hint = " Of `named_parameters()` give the names, of a module its name."
    raise TypeError(f"`{argument}` takes a list whose entries are each {_ACCEPTED}; got {got}.{hint}")


def _is_layer_type(entry: Any) -> bool:
    return isinstance(entry, type) and issubclass(entry, nn.Module)


def _candidates(module: nn.Module) -> Iterator[_Candidate]:
    """Every trainable tensor of `module` once, with all of its names; copies held for averaging left out."""
    copies = averaged_prefixes(module)
    found: dict[int, list[tuple[str, nn.Module, nn.Parameter]]] = {}
    for module_name, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            name = f"{module_name}.{attribute}" if module_name else attribute
            if parameter is not None and not name.startswith(copies) and not _inside_parametrization(owner, name):
                found.setdefault(id(parameter), []).append((name, owner, parameter))
    for uses in found.values():
        yield _Candidate(
            names=tuple(name for name, _, _ in uses),
            owners=tuple(owner for _, owner, _ in uses),
            module_names=tuple(name.rpartition(".")[0] for name, _, _ in uses),
            parameter=uses[0][2],
        )


def _inside_parametrization(owner: nn.Module, name: str) -> bool:
    return isinstance(owner, parametrize.ParametrizationList) or ".parametrizations." in f".{name}"


def _wrapped_layers(module: nn.Module) -> Iterator[_Wrapped]:
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if parametrize.is_parametrized(layer):
            tensors = [str(tensor) for tensor in layer.parametrizations]
            classes = [type(p).__name__.lstrip("_") for t in tensors for p in layer.parametrizations[t]]
            base = type(layer).__mro__[1]
            remedy = f"Call torch.nn.utils.parametrize.remove_parametrizations(layer, {tensors[0]!r}) first"
            yield _Wrapped(name, base.__name__, base, f"the parametrization {', '.join(classes)}", remedy)
        elif isinstance(layer, _DEFAULT_LAYERS) and (tensor := _hooked_tensor(layer)):
            source = tensor.removesuffix("_orig").removesuffix("_g")
            how = "torch.nn.utils.prune" if tensor.endswith("_orig") else "weight_norm"
            remedy = (
                f"Call torch.nn.utils.prune.remove(layer, {source!r}) or remove_spectral_norm first"
                if how == "torch.nn.utils.prune"
                else "Call torch.nn.utils.remove_weight_norm(layer) first"
            )
            wrapper = f"a {how} hook" if how == "weight_norm" else "a torch.nn.utils.prune or spectral_norm hook"
            yield _Wrapped(name, kind, type(layer), wrapper, remedy)


def _hooked_tensor(layer: nn.Module) -> str | None:
    """Name of the tensor that an old-style hook put in place of a weight."""
    for name in layer._parameters:
        source = name.removesuffix("_orig").removesuffix("_g")
        if source != name and source not in layer._parameters and source in layer.__dict__ | layer._buffers:
            return name
    return None


def _is_default(owner: nn.Module, attribute: str, parameter: nn.Parameter) -> bool:
    if not isinstance(owner, _DEFAULT_LAYERS):
        return False
    if not isinstance(parameter, nn.parameter.UninitializedParameter) and parameter.dim() < 2:
        return False
    if isinstance(owner, _RECURRENT):
        return attribute.startswith(("weight_ih", "weight_hh"))
    if isinstance(owner, nn.MultiheadAttention):
        return attribute in _ATTENTION_PROJECTIONS
    return attribute == "weight"


def _bias_of(owner: nn.Module, attribute: str) -> str | None:
    """The bias that is added to the same output units as the weight `attribute`."""
    if not isinstance(owner, _DEFAULT_LAYERS):
        return None
    names = {"weight": "bias", "in_proj_weight": "in_proj_bias"}
    name = names.get(attribute, attribute.replace("weight_", "bias_") if isinstance(owner, _RECURRENT) else "")
    return name if name != attribute and owner._parameters.get(name) is not None else None


def _path(class_: type) -> str:
    public = class_.__module__.replace("torch.nn.modules", "torch.nn")
    return f"torch.nn.{class_.__name__}" if public.startswith("torch.nn.") else f"{class_.__module__}.{class_.__name__}"


def _listed(names: Iterable[str], limit: int = 12) -> str:
    listed = [name for name in names if name]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
