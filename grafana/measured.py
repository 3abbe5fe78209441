"""What the benchmark of detection has found of each detector, read from its page."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SECTION = "## By detector\n"
_HEAD = "**Measured** ([all of them](../detection.md#by-detector))."
_RUNS = re.compile(r"paged in (\d+) healthy runs")
_ROW = re.compile(
    r"^\| `(?P<name>\w+)` \| (?P<meant>\d+) \| (?P<first>\d+) \| (?P<found>\d+) "
    r"\| (?P<late>-|\d+, \S+) \| (?P<paged>\d+) \| (?P<warned>\d+) \|$",
    re.MULTILINE,
)
_CANNOT = "**What it cannot tell.**"


@dataclass(frozen=True, slots=True)
class Measured:
    """One detector: counts of runs.

    Attributes:
        meant: with a fault that it is meant for.
        first: of them, those in which it was the first such detector to speak, in time.
        found: of them, those that it or another one found in time.
        late: steps after the fault, median and 90 %; "" where it was never the first.
        paged, warned: healthy runs in which it did.
        healthy: all of these.
    """

    meant: int
    first: int
    found: int
    late: str
    paged: int
    warned: int
    healthy: int

    def __str__(self) -> str:
        median, _, most = self.late.partition(", ")
        steps = f" (median {median} steps after it, 90 % within {most})" if median else ""
        return (
            f"of {self.meant} runs with a fault that it is meant for it was the first to find "
            f"{self.first}{steps}, and {self.found} were found by it or another detector; in "
            f"{self.healthy} healthy runs it paged in {self.paged} and warned in {self.warned}"
        )


def read(page: str) -> dict[str, Measured]:
    """Return what the page of the benchmark says of each detector, by name.

    Raises:
        ValueError: the page has no table by detector, or one of another form.
    """
    section = page.partition(_SECTION)[2].partition("\n## ")[0]
    runs = _RUNS.search(section)
    rows = list(_ROW.finditer(section))
    if runs is None or not rows or len(rows) != section.count("\n| `"):
        raise ValueError("docs/detection.md has no table by detector, or one of another form")
    return {
        row["name"]: Measured(
            int(row["meant"]), int(row["first"]), int(row["found"]), row["late"].strip("-"),
            int(row["paged"]), int(row["warned"]), int(runs[1]),
        )
        for row in rows
    }  # fmt: skip


def told(page: str, measured: dict[str, Measured]) -> str:
    """Return the page of the detectors with what was measured of each, in its section.

    Args:
        page: Markdown, with a section of each detector whose heading names it.
        measured: by detector; one that is not there is said not to be measured yet.
    """
    return "".join(_section(s, measured) for s in re.split(r"^(?=## )", page, flags=re.MULTILINE))


def _section(text: str, measured: dict[str, Measured]) -> str:
    heading, _, body = text.partition("\n")
    names = re.findall(r"`(\w+)`", heading) if heading.startswith("## ") else []
    if not names or f"\n{_CANNOT}" not in body:
        return text
    body = re.sub(r"^\*\*Measured\*\* .*\n\n", "", body, flags=re.MULTILINE)
    said = "; ".join(f"`{n}`: {measured.get(n, 'not yet')}" for n in names)
    before, _, after = body.partition(f"\n{_CANNOT}")
    return f"{heading}\n{before}\n{_HEAD} {said}.\n\n{_CANNOT}{after}"
