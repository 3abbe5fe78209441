"""Executes the notebook of the documents: `python -m tests.notebook` writes its output anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "docs" / "how-to" / "notebook.ipynb"
SECONDS = 120  # of a cell


def executed(
    directory: Path, notebook: nbformat.NotebookNode | None = None, *, allow_errors: bool = False
) -> nbformat.NotebookNode:
    """Return a notebook with the output that it has in a kernel that starts in a directory.

    Args:
        directory: the kernel's own.
        notebook: instead of the one of the documents.
        allow_errors: a cell that raises does not end it.
    """
    notebook = notebook or nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS, allow_errors=allow_errors,
        resources={"metadata": {"path": str(directory)}},
    )  # fmt: skip
    return client.execute()


def main() -> None:
    """Write it anew, without what differs from one execution to the next."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The run's daemon may still be at work in there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        notebook = executed(Path(directory))
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
