"""Rich tables as plain text."""

import io

from rich.console import Console
from rich.table import Table


def render(table: Table, width: int = 120) -> str:
    """The table as text, for logs and files."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()
