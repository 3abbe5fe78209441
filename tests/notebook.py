"""Executes the notebook of the documents: `python -m tests.notebook` writes its output anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "docs" / "how-to" / "notebook.ipynb"
SECONDS = 120  # of a cell


def executed(directory: Path) -> nbformat.NotebookNode:
    """Return the notebook with the output that it has in a kernel that starts in a directory."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    context = {"metadata": {"path": str(directory)}}
    return NotebookClient(notebook, timeout=SECONDS, resources=context).execute()


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
