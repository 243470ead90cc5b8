"""Genome files: real ones, and what is refused."""

import json
import zipfile

import pytest

from sparsecomp.functions.genome_file import read_genome

NODE = '<node type="{type}" label="{label}"><marking branch="1" id="{id}"/><activation>{f}(x)</activation></node>'
LINK = '<link><source branch="1" id="{a}"/><target branch="1" id="{b}"/><weight>{w}</weight></link>'
NODES = [("in", "x", 0, "identity"), ("hidden", "", 1, "gaussian"), ("out", "ink", 2, "sin")]
LINKS = [(0, 1, 0.5), (1, 2, -2.0), (0, 2, 0.25)]


def xml(nodes=NODES, links=LINKS, head=""):
    parts = [NODE.format(type=t, label=la, id=i, f=f) for t, la, i, f in nodes]
    parts += [LINK.format(a=a, b=b, w=w) for a, b, w in links]
    return f"{head}<genome>{''.join(parts)}</genome>"


@pytest.mark.parametrize("zipped", [False, True])
def test_a_small_one(tmp_path, zipped):
    path = tmp_path / "genome"
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", xml())
    else:
        path.write_text(xml())
    graph = read_genome(path)
    assert dict(graph.nodes(data="activation")) == {"1_0": "identity", "1_1": "gaussian", "1_2": "sin"}
    assert dict(graph.nodes(data="type")) == {"1_0": "in", "1_1": "hidden", "1_2": "out"}
    assert [graph.nodes[name]["label"] for name in graph] == ["x", "", "ink"]
    assert list(graph.edges(data="weight")) == [("1_0", "1_1", 0.5), ("1_0", "1_2", 0.25), ("1_1", "1_2", -2.0)]


def test_parallel_links_add(tmp_path):
    (tmp_path / "g").write_text(xml(links=[*LINKS, (0, 1, 0.25)]))
    assert read_genome(tmp_path / "g").edges["1_0", "1_1"]["weight"] == 0.75


@pytest.mark.parametrize("picture", ["skull", "butterfly", "apple"])
def test_real_ones_equal_their_plain_form(fer, picture):
    graph = read_genome(fer / f"{picture}.zip")
    plain = json.loads((fer / f"genome_{picture}.json").read_text())
    added = {node["id"] for node in plain["nodes"]} - set(graph)  # the skull's plain form has two constants more
    assert len(added) == (2 if picture == "skull" else 0)
    expected = {node["id"]: node["activation"] for node in plain["nodes"] if node["id"] not in added}
    assert dict(graph.nodes(data="activation")) == expected
    links = {(link["source"], link["target"]): link["weight"] for link in plain["links"]}
    links = {ends: weight for ends, weight in links.items() if not added & set(ends)}
    assert {(a, b): weight for a, b, weight in graph.edges(data="weight")} == links


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (xml(links=[*LINKS, (2, 1, 1.0)]), "must have no cycle; there is one through 1_1, 1_2"),
        (xml(links=[*LINKS, (1, 1, 1.0)]), "must have no cycle; there is one through 1_1"),
        (xml(links=[(0, 9, 1.0)]), "a link leads from 1_0 to 1_9, and there is no node 1_9"),
        (xml(links=[(8, 1, 1.0)]), "there is no node 1_8"),
        (xml([*NODES, ("hidden", "", 3, "step")]), "the activation of node 1_3 must be one of .*; got 'step'"),
        (xml([*NODES, ("maybe", "", 3, "sin")]), "the type of node 1_3 .*; got 'maybe'"),
        (xml([*NODES, NODES[0]]), "there are two nodes 1_0"),
        (xml(NODES[:2], LINKS[:1]), "no node of type 'out'"),
        (xml(links=[(0, 1, "inf")]), "the weight from 1_0 to 1_1 must be finite; got 'inf'"),
        (xml(links=[(0, 1, "much")]), "could not convert"),
        (xml(links=[(0, 1, "")]), "must be finite; got ''"),
        (xml().replace('<marking branch="1" id="1"/>', ""), "a node has no branch and id"),
        (xml()[:200], "is broken"),
        ("", "is broken"),
        (xml(head='<!DOCTYPE a [<!ENTITY b "c">]>'), "EntitiesForbidden"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, words):
    (tmp_path / "g").write_text(content)
    with pytest.raises(ValueError, match=f"`path` is the file of a Picbreeder genome, and .*{words}"):
        read_genome(tmp_path / "g")


def test_sizes_and_members(tmp_path):
    (tmp_path / "g").write_text(xml())
    size = len(xml())
    read_genome(tmp_path / "g", max_bytes=size)
    with pytest.raises(ValueError, match=f"more than `max_bytes`={size - 1} bytes"):
        read_genome(tmp_path / "g", max_bytes=size - 1)
    with zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", xml() + " " * 10**6)
        archive.writestr("b", xml())
    with pytest.raises(ValueError, match="must have one member; it has 2"):
        read_genome(tmp_path / "z")
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", xml() + " " * 10**6)
    with pytest.raises(ValueError, match="more than `max_bytes`=10000 bytes"):
        read_genome(tmp_path / "bomb", max_bytes=10_000)
    whole = (tmp_path / "bomb").read_bytes()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is none, or is broken"):
        read_genome(tmp_path / "half")
    with pytest.raises(FileNotFoundError, match="must exist"):
        read_genome(tmp_path / "no")
