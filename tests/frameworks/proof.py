"""What the tests of the frameworks have shown, as a table: python -m tests.frameworks.proof.

It reads `.venv-*/proof.xml`, which `make test-frameworks` leaves, and writes the block of
docs/how-to/frameworks.md. A cell is filled only from tests that ran, on one rank and on two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

HOME = Path(__file__).parents[2]
PAGE = HOME / "docs" / "how-to" / "frameworks.md"
BLOCK = re.compile(r"(<!-- proof -->\n).*?(<!-- end of proof -->)", re.DOTALL)
# Column: the beginning of the names of the tests that show it.
COLUMNS = {
    "same bits, all sites, clean end": "test_training_is_the_same_and_everything_is_observed",
    "true loss": "test_the_loss_is_the_",
    "step number, resumed": "test_a_resumed_training_is_a_further_attempt",
    "stop": "test_for_an_anomaly_",
    "fault named": "test_a_nan_is_named_by",
}
# Row: the file of its tests, and what their parameters begin with, one of several.
ROWS: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "Hugging Face `Trainer`": ("test_huggingface", ""),
    "TRL `SFTTrainer`": ("test_trl", ("('sft', ", "sft]")),
    "TRL `DPOTrainer`": ("test_trl", ("('dpo', ", "dpo]")),
    "Lightning `Trainer`": ("test_lightning", ""),
    "Lightning Fabric": ("test_loops", "('fabric', "),
    "Accelerate": ("test_loops", "('accelerate', "),
    "Ray Train": ("test_ray", ""),
    "DeepSpeed ZeRO-1": ("test_deepspeed", "('zero1', "),
    "DeepSpeed ZeRO-2": ("test_deepspeed", "('zero2', "),
    "DeepSpeed ZeRO-2, bf16": ("test_deepspeed", "('zero2-bf16', "),
}
Results = dict[tuple[str, str, str], str]  # by file, test, parameters


def results_of(files: Iterable[Path]) -> Results:
    """Return how each test that was not skipped came out: "passed" or "failed"."""
    found: Results = {}
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            name, _, parameters = case.attrib["name"].partition("[")
            outcome = {child.tag for child in case}
            if "skipped" not in outcome:
                key = (case.attrib["classname"].rpartition(".")[2], name, parameters)
                found[key] = "failed" if outcome & {"failure", "error"} else "passed"
    return found


def cell(results: Mapping[tuple[str, str, str], str], row: str, column: str) -> str:
    """Return what stands in the table: nothing is said without a test, or of one not run."""
    file, begin = ROWS[row]
    outcomes = [
        outcome
        for (where, name, parameters), outcome in results.items()
        if where == file and name.startswith(COLUMNS[column]) and parameters.startswith(begin)
    ]
    if not outcomes:
        return "-"
    return "FAILED" if "failed" in outcomes else "yes"


def table(results: Results) -> str:
    """Return the rows of frameworks of which any test ran."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in ROWS:
        cells = [cell(results, row, column) for column in COLUMNS]
        if set(cells) == {"-"}:
            cells = ["not run"] * len(cells)
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the block."""
    made = table(results_of(HOME.glob(".venv-*/proof.xml")))
    page = PAGE.read_text()
    PAGE.write_text(BLOCK.sub(lambda block: block[1] + made + block[2], page))


if __name__ == "__main__":
    main()
