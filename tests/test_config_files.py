"""Config files that build on others: order, relative paths, cycles, and what is said of a wrong one."""

import pytest
import yaml
from command_line import CONFIGS, refused, resolved

BASE = CONFIGS / "experiment" / "digits_magnitude.yaml"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def config(folder, *paths):
    """What these files are together."""
    return yaml.safe_load(resolved(folder, "fit", *(f"--config={path}" for path in paths)))


def test_bases_are_relative_to_the_file_and_nested(tmp_path):
    write(tmp_path / "top.yaml", f"base: {BASE}\nseed_everything: 1\ntrainer: {{max_epochs: 11}}\n")
    write(tmp_path / "inner/middle.yaml", "base: ../top.yaml\ntrainer: {min_epochs: 3}\n")
    last = write(tmp_path / "inner/deep/last.yaml", "base: [../middle.yaml]\ndata: {init_args: {validation: 7}}\n")
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    found = config(elsewhere, last)
    assert found["seed_everything"] == 1
    assert (found["trainer"]["max_epochs"], found["trainer"]["min_epochs"]) == (11, 3)
    assert found["data"]["init_args"]["validation"] == 7
    assert found["data"]["init_args"]["batch_size"] == 64


def test_a_file_may_be_named_relative_to_where_one_is(tmp_path):
    write(tmp_path / "sub/top.yaml", f"base: {BASE}\ntrainer: {{max_epochs: 11}}\n")
    write(tmp_path / "sub/next.yaml", "base: top.yaml\n")  # nothing but a base
    assert config(tmp_path, "sub/next.yaml")["trainer"]["max_epochs"] == 11


def test_later_layers_win(tmp_path):
    write(tmp_path / "a.yaml", "seed_everything: 1\ntrainer: {max_epochs: 1, min_epochs: 1, max_steps: 1}\n")
    write(tmp_path / "b.yaml", "trainer: {max_epochs: 2, min_epochs: 2}\n")
    both = write(tmp_path / "both.yaml", f"base: [{BASE}, a.yaml, b.yaml]\ntrainer: {{max_epochs: 3}}\n")
    trainer = config(tmp_path, both)["trainer"]
    assert (trainer["max_epochs"], trainer["min_epochs"], trainer["max_steps"]) == (3, 2, 1)
    reverse = write(tmp_path / "reverse.yaml", f"base: [{BASE}, b.yaml, a.yaml]\n")
    trainer = config(tmp_path, reverse)["trainer"]
    assert (trainer["max_epochs"], trainer["min_epochs"], trainer["max_steps"]) == (1, 1, 1)
    # Files of the command line are layers too, and an option is the last word.
    text = resolved(tmp_path, "fit", f"--config={both}", "--config=b.yaml", "--trainer.min_epochs=9")
    trainer = yaml.safe_load(text)["trainer"]
    assert (trainer["max_epochs"], trainer["min_epochs"]) == (2, 9)


def test_a_base_used_twice_is_no_cycle(tmp_path):
    write(tmp_path / "shared.yaml", f"base: {BASE}\n")
    write(tmp_path / "a.yaml", "base: shared.yaml\nseed_everything: 1\n")
    write(tmp_path / "b.yaml", "base: shared.yaml\ntrainer: {max_epochs: 2}\n")
    # As documented, layers are read in order: b reads the shared file again, over a's seed.
    both = config(tmp_path, write(tmp_path / "both.yaml", "base: [a.yaml, b.yaml]\n"))
    assert (both["seed_everything"], both["trainer"]["max_epochs"]) == (0, 2)


def test_init_args_alone_merge_into_the_class_below(tmp_path):
    pruning = "pruning: {init_args: {schedule: {init_args: {final_sparsity: 0.3}}}}\n"
    model = "model: {init_args: {network: {init_args: {hidden: [5]}}}}\n"
    found = config(tmp_path, write(tmp_path / "overlay.yaml", f"base: {BASE}\n{pruning}{model}"))
    schedule = found["pruning"]["init_args"]["schedule"]
    assert schedule["class_path"].endswith("Polynomial")
    assert (schedule["init_args"]["final_sparsity"], schedule["init_args"]["begin"]) == (0.3, 0.05)
    assert found["pruning"]["init_args"]["criterion"]["class_path"].endswith("Magnitude")
    network = found["model"]["init_args"]["network"]["init_args"]
    assert (network["hidden"], network["in_features"]) == ([5], 64)


def test_another_class_does_not_keep_what_it_cannot_take(tmp_path):
    overlay = "pruning: {init_args: {schedule: {class_path: OneShot, init_args: {final_sparsity: 0.3, at: 1}}}}\n"
    found = config(tmp_path, write(tmp_path / "overlay.yaml", f"base: {BASE}\n{overlay}"))
    schedule = found["pruning"]["init_args"]["schedule"]
    assert schedule["class_path"].endswith("OneShot")
    assert set(schedule["init_args"]) == {"final_sparsity", "at", "unit"}


def test_validate_and_test_take_layers_too(tmp_path):
    overlay = write(tmp_path / "overlay.yaml", f"base: {BASE}\ndata: {{init_args: {{validation: 9}}}}\n")
    for subcommand in ("validate", "test"):
        found = yaml.safe_load(resolved(tmp_path, subcommand, f"--config={overlay}"))
        assert found["data"]["init_args"]["validation"] == 9


WRONG = {
    # contents of the files, the first one given to the command line; what the message must name
    "missing": ({"a.yaml": "base: [gone.yaml]\n"}, ["a.yaml", "base", "gone.yaml"]),
    "missing, deeper": ({"a.yaml": "base: b.yaml\n", "b.yaml": "base: sub/gone.yaml\n"}, ["b.yaml", "sub/gone.yaml"]),
    "itself": ({"a.yaml": "base: a.yaml\n"}, ["a.yaml", "back"]),
    "cycle": (
        {"a.yaml": "base: b.yaml\n", "b.yaml": "base: c.yaml\n", "c.yaml": "base: a.yaml\n"},
        ["c.yaml", "a.yaml"],
    ),
    "null": ({"a.yaml": "base:\ntrainer: {max_epochs: 1}\n"}, ["a.yaml", "base"]),
    "number": ({"a.yaml": "base: 3\n"}, ["a.yaml", "base", "3"]),
    "list of numbers": ({"a.yaml": "base: [3]\n"}, ["a.yaml", "base", "3"]),
    "mapping": ({"a.yaml": "base: {x: 1}\n"}, ["a.yaml", "base"]),
    "no YAML": ({"a.yaml": "trainer: {max_epochs: 1\n"}, ["a.yaml"]),
    "no YAML, deeper": ({"a.yaml": "base: b.yaml\n", "b.yaml": "a: [1\n"}, ["b.yaml"]),
    "a list": ({"a.yaml": "- 1\n- 2\n"}, ["a.yaml"]),
    "wrong key, deeper": ({"a.yaml": "base: b.yaml\n", "b.yaml": "trainr: {max_epochs: 1}\n"}, ["trainr", "trainer"]),
    "folder": ({"a.yaml": "base: sub\n", "sub/x.yaml": ""}, ["a.yaml", "base", "sub"]),
    "bytes": ({"a.yaml": "base: b.yaml\n", "b.yaml": b"\xff\xfe\x00\x01"}, ["b.yaml"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_one_message_that_names_it(tmp_path, kind):
    files, wanted = WRONG[kind]
    for name, content in files.items():
        write(tmp_path / name, "").write_bytes(content if isinstance(content, bytes) else content.encode())
    status, message = refused(tmp_path, "fit", "--config=a.yaml")
    assert status == 2
    assert message.count("error:") == 1
    assert "Traceback" not in message
    assert [word for word in wanted if word not in message] == [], message
