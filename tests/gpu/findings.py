"""What one part has found, on disk after every line, so that a killed part leaves what it had."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Results of a line. `missed`: it works, but a figure does not reach its goal. `void`: the training
# without the probe does the same, so the line says nothing about the probe.
PASSED, FAILED, MISSED, VOID, SKIPPED = "passed", "failed", "missed", "void", "skipped"
# States of a part; `running` on disk means that it was killed with all that looked after it.
NO_DEVICE, NO_PACKAGES, DRY, RUNNING = "no CUDA device", "packages missing", "dry run", "running"

TABLE = "gpu.json"


def path_of(results: Path, part: str) -> Path:
    """Return the file of a part in a directory of results."""
    return results / f"gpu-{part}.json"


class Findings:
    """The lines of one part, in a file that is replaced after each of them.

    Args:
        path: the file; what it holds already is gone on with, unless `fresh`.
        part: name of the part.
        device: "cuda" or "cpu".
        fresh: whether to begin anew.
    """

    def __init__(self, path: Path, part: str, device: str, *, fresh: bool = False) -> None:
        self._path = path
        self.told: dict[str, Any] = {
            "part": part, "device": device, "status": RUNNING, "note": "", "running": None,
            "since": 0.0, "cases": [], "seconds": {}, "machine": {}, "lines": [],
        }  # fmt: skip
        if path.exists() and not fresh:
            self.told = json.loads(path.read_text())
        self.write()

    @property
    def running(self) -> str | None:
        """The case under way, None between cases."""
        return self.told["running"]

    @property
    def done(self) -> set[str]:
        """The cases that are over."""
        return set(self.told["seconds"])

    @property
    def left(self) -> list[str]:
        """The cases that have not been begun, as far as they are known."""
        return [case for case in self.told["cases"] if case not in self.done | {self.running}]

    def begin(self, case: str) -> None:
        self.told |= {"running": case, "since": time.time()}
        self.write()

    def end(self) -> None:
        """End the case under way."""
        self.told["seconds"][self.told["running"]] = round(time.time() - self.told["since"], 1)
        self.told["running"] = None
        self.write()

    def add(self, what: str, result: str, text: str, **more: Any) -> None:
        """Keep one line of the case under way: its name, its result, and a text for the table."""
        line = {"case": self.running, "what": what, "result": result, "text": text, **more}
        self.told["lines"].append(line)
        self.write()

    def check(self, what: str, *, holds: bool, text: str, **more: Any) -> None:
        self.add(what, PASSED if holds else FAILED, text, **more)

    def figure(
        self, what: str, values: Sequence[float], unit: str = "", *, most: float | None = None,
        least: float | None = None, digits: int = 3, **more: Any,
    ) -> None:  # fmt: skip
        """Keep a measured figure: all values, and how their median stands to its goal.

        A goal is one for a GPU: a dry run states none.
        """
        middle = statistics.median(values)
        text = f"{middle:.{digits}f}"
        if len(values) > 1:
            text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
        goal, reached = "", True
        if self.told["device"] == "cpu":
            pass
        elif most is not None:
            goal, reached = f"<= {most:g}", middle <= most
        elif least is not None:
            goal, reached = f">= {least:g}", middle >= least
        result = PASSED if reached else MISSED
        more |= {"values": [float(f"{value:.6g}") for value in values], "unit": unit}
        self.add(what, result, f"{text} {unit}".strip(), goal=goal, **more)

    def finish(self) -> None:
        """Say how the part as a whole went, from its lines."""
        results = {line["result"] for line in self.told["lines"]}
        status = FAILED if FAILED in results else PASSED
        if status == PASSED and self.told["device"] == "cpu":
            status = DRY
        elif status == PASSED and not results & {PASSED, MISSED}:
            status = SKIPPED
        self.stop(status)

    def stop(self, status: str, note: str = "") -> None:
        self.told |= {"status": status, "note": note, "running": None}
        self.write()

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        made = self._path.with_suffix(".tmp")
        made.write_text(json.dumps(self.told, indent=1) + "\n")
        os.replace(made, self._path)


def summary(told: dict[str, Any]) -> str:
    """Return how many lines of a part came out how: "7 passed, 1 missed"."""
    results = [line["result"] for line in told["lines"]]
    counts = ((kind, results.count(kind)) for kind in (PASSED, FAILED, MISSED, VOID, SKIPPED))
    return ", ".join(f"{count} {kind}" for kind, count in counts if count)


def table(parts: Sequence[dict[str, Any]]) -> str:
    """Return some parts as text to read in a terminal: all that is no plain success."""
    rows = [("part", "case", "what", "result", "figure", "goal")]
    for told in parts:
        rows += _rows(told)
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), *row[4:]]
        ).rstrip()
        for row in rows
    )


def _rows(told: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for line in told["lines"]:
        if line["result"] in (PASSED, SKIPPED) and "values" not in line:
            continue
        text = line["text"].splitlines()[-1][:160] if line["text"] else ""
        goal = line.get("goal", "")
        yield told["part"], line["case"] or "", line["what"], line["result"], text, goal
    seconds = f"{sum(told['seconds'].values()):.0f} s"
    text = " ".join(filter(None, (told["note"], summary(told))))
    yield told["part"], "", f"all ({seconds})", told["status"].upper(), text, ""
