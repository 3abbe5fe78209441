"""The runbook of the first cause explains every detector that can page, and no other."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.suite import DETECTORS

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "reference" / "detectors.md"
RUNBOOK = DOCS / "runbooks" / "DdpprobeFirstCause.md"


def pagers() -> set[str]:
    """Return the detectors that can page, by their code or by the reference."""
    by_code = {
        detector.name
        for detector in DETECTORS
        if any(is_a_level(node) for node in ast.walk(ast.parse(source_of(detector))))
    }
    table = PAGE.read_text().partition("\n## Every detector and its settings\n")[2]
    by_table = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\b[Pp]ages\b", table, re.MULTILINE)
    return by_code | set(by_table)


def source_of(detector: type[Detector]) -> str:
    return Path(inspect.getfile(detector)).read_text()


def is_a_level(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == "page"


def test_the_runbook_of_the_alert_explains_each_detector_that_can_page() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", RUNBOOK.read_text(), re.MULTILINE))
    assert {"nonfinite", "weight_jump", "never_updated"} <= pagers()
    assert explained - {"detector"} == pagers()
