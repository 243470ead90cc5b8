"""One thread a test, `from helpers import ...` in every test, and where other people's networks are."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

TEST_DATA = Path(os.environ.get("SPARSECOMP_TEST_DATA", Path(__file__).parents[1] / ".." / "shared" / "data"))


@pytest.fixture(scope="session")
def fer():
    """The folder with six networks that nobody here made; they are not in the repository."""
    folder = TEST_DATA / "fer"
    if not folder.is_dir():
        pytest.skip(f"there are no networks in {folder}; set SPARSECOMP_TEST_DATA to the folder that has fer/")
    return folder


def pytest_report_header():
    """Say whether the tests on other people's networks run."""
    found = len(list((TEST_DATA / "fer").glob("*.npz")))
    return f"networks of others: {found} in {TEST_DATA / 'fer'}" if found else "networks of others: none, skipped"
