"""Runs notebooks in place and stores their outputs, ready to commit: ``make notebooks``.

What differs from run to run without meaning anything (timings, widget state, the kernel's version) is left out, so
that a diff shows only what changed for a reader.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def run(path: Path, timeout: int = 120) -> None:
    """Restart, run all, write back. Raises nbclient's CellExecutionError at the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    # Printed lines arrive in as many pieces as the kernel's timing makes of them: one stream a cell is stored.
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
    )
    client.execute(env={**os.environ, "MINILLM_GRADING": "1"})  # a solution's last cell, grade(), stays quiet
    nbformat.write(clean(notebook), path)


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what is not worth committing; keep outputs, execution counts, cell ids, tags and waivers.

    A widget's output is its kernel's and dies with it: the static cell below it is what a page shows.
    """
    kept = {"minillm": notebook.metadata["minillm"]} if "minillm" in notebook.metadata else {}
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}, **kept})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {})]
        for output in cell.get("outputs", []):
            output.get("metadata", {}).clear()
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.notebooks", description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        print(f"running {path}", file=sys.stderr)
        run(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
