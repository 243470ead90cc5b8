"""Genomes of Picbreeder from XML files, zipped or plain, that may come from strangers."""

import math
import zipfile
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

import networkx as nx
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from sparsecomp._checks import check_int

ACTIVATIONS = ("cos", "gaussian", "identity", "sigmoid", "sin")
_TYPES = ("in", "hidden", "out")
_MEANING = "`path` is the file of a Picbreeder genome"


def read_genome(path: str | Path, max_bytes: int = 2**24) -> nx.DiGraph:
    """The graph of a genome: nodes with `activation`, `type` ("in", "hidden" or "out") and `label`, edges with `weight`.

    A node computes its activation of the weighted sum of its sources. Nodes are named `{branch}_{id}`. Weights of several
    links between the same two nodes are added. A zip file must have a single member.

    Args:
        path: The XML file, or a zip file of it.
        max_bytes: The largest size of the XML, unpacked, >= 1.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is too large, is broken, declares entities, has a cycle, an unknown activation, a link to or from
            no node, or a weight that is not finite.

    Reference:
        J. Secretan et al.: Picbreeder: Evolving Pictures Collaboratively Online, CHI 2008.

    >>> import tempfile
    >>> xml = '''<genome><nodes>
    ... <node type="in" label="x"><marking branch="1" id="0"/><activation>identity(x)</activation></node>
    ... <node type="out" label="ink"><marking branch="1" id="1"/><activation>sin(x)</activation></node></nodes>
    ... <links><link><source branch="1" id="0"/><target branch="1" id="1"/><weight>0.5</weight></link></links></genome>'''
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     _ = file.write(xml)
    ...     file.flush()
    ...     graph = read_genome(file.name)
    >>> list(graph.edges(data="weight")), graph.nodes["1_1"]["activation"]
    ([('1_0', '1_1', 0.5)], 'sin')
    """
    check_int("max_bytes", max_bytes, "the largest size of the XML", minimum=1)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{_MEANING} and must exist; got {str(path)!r}, where there is no file.")
    try:
        root = fromstring(_unpacked(Path(path), max_bytes))
        return _graph(root)
    except (ValueError, ParseError, DefusedXmlException, zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"{_MEANING}, and {path} is none, or is broken: {error}") from error


def _unpacked(path: Path, max_bytes: int) -> bytes:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            if len(members) != 1:
                raise ValueError(f"a zip file must have one member; it has {len(members)}.")
            with archive.open(members[0]) as file:
                data = file.read(max_bytes + 1)  # what the archive says of its size need not be true
    else:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than `max_bytes`={max_bytes} bytes.")
    return data


def _graph(root: Element) -> nx.DiGraph:
    graph = nx.DiGraph()
    for node in root.iter("node"):
        name = _name(node.find("marking"), "a node")
        activation = (node.findtext("activation") or "").strip().removesuffix("(x)")
        if name in graph:
            raise ValueError(f"there are two nodes {name}.")
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"the activation of node {name} must be one of {', '.join(ACTIVATIONS)}; got {activation!r}."
            )
        if node.get("type") not in _TYPES:
            raise ValueError(f"the type of node {name} must be one of {', '.join(_TYPES)}; got {node.get('type')!r}.")
        graph.add_node(name, activation=activation, type=node.get("type"), label=node.get("label", ""))
    for link in root.iter("link"):
        source, target = (_name(link.find(end), f"the {end} of a link") for end in ("source", "target"))
        for end in (source, target):
            if end not in graph:
                raise ValueError(f"a link leads from {source} to {target}, and there is no node {end}.")
        weight = float(link.findtext("weight") or "nan")
        if not math.isfinite(weight):
            raise ValueError(f"the weight from {source} to {target} must be finite; got {link.findtext('weight')!r}.")
        before = graph.edges[source, target]["weight"] if graph.has_edge(source, target) else 0.0
        graph.add_edge(source, target, weight=before + weight)
    if not any(kind == "out" for _, kind in graph.nodes(data="type")):
        raise ValueError("it has no node of type 'out'.")
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [source for source, _ in nx.find_cycle(graph)]
        raise ValueError(f"its links must have no cycle; there is one through {', '.join(cycle)}.")
    return graph


def _name(element: Element | None, what: str) -> str:
    if element is None or element.get("branch") is None or element.get("id") is None:
        raise ValueError(f"{what} has no branch and id.")
    return f"{element.get('branch')}_{element.get('id')}"
