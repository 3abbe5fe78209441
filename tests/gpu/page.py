"""docs/gpu.md, and what the README says of GPUs: both from docs/gpu.json, the last table.

Without a table they say that no line has run on a GPU. A table of a dry run is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.findings import FAILED, MISSED, PASSED, SKIPPED, VOID, summary
from tests.gpu.parts import PARTS

HOME = Path(__file__).resolve().parents[2]
TABLE = HOME / "docs" / "gpu.json"
PAGE = HOME / "docs" / "gpu.md"
README = HOME / "README.md"
BEGIN, END = "<!-- begin: tests/gpu/page.py writes this -->", "<!-- end -->"
NEVER = "No line of ddpprobe has run on a GPU yet"

_HEAD = """# What has run on a GPU

`make test-gpu` shows on a GPU what only a GPU can show, in parts that run alone; `CONTRIBUTING.md`
says how. This page is written from the last table of it, `docs/gpu.json`.
"""


def read(path: Path = TABLE) -> dict[str, Any] | None:
    """Return the last table, None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def write(tables: Sequence[Path], home: Path = HOME) -> list[Path]:
    """Keep tables as the last one; write the page and the README's sentence; return the files.

    Args:
        tables: files gpu.json that `make test-gpu` has written, perhaps part by part; of a part
            that is in several, the last one counts.
        home: where docs/ and README.md are.

    Raises:
        SystemExit: one is of a dry run, or no part of it had a GPU.
    """
    parts: dict[str, dict[str, Any]] = {}
    for table in tables:
        told = json.loads(table.read_text())
        if told["device"] != "cuda" or not any(map(had_gpu, told["parts"])):
            raise SystemExit(f"{table} is no table of a GPU: run make test-gpu where there is one")
        parts |= {part["part"]: part for part in told["parts"] if had_gpu(part)}
    told["parts"] = [parts[name] for name in PARTS if name in parts]
    for part in told["parts"]:
        for line in part["lines"]:
            line.pop("trace", None)  # paths of a machine, which the logs have
    files = {
        TABLE: json.dumps(told, indent=1) + "\n",
        PAGE: markdown(told),
        README: readme(README.read_text(), told),
    }
    for path, text in files.items():
        (home / path.relative_to(HOME)).write_text(text)
    return list(files)


def had_gpu(part: dict[str, Any]) -> bool:
    """Return whether a part has run on a GPU, whatever came of it."""
    return bool(part["machine"].get("device"))


def readme(text: str, told: dict[str, Any] | None) -> str:
    """Return the README with the sentence on GPUs between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{sentence(told)}\n{END}{behind}"


def sentence(told: dict[str, Any] | None) -> str:
    """Return the item of the README's limits."""
    if told is None:
        return (
            f"- **{NEVER}**: no figure and no test here is one of a GPU. `make test-gpu` is the\n"
            "  command for the day there is one ([GPU](docs/gpu.md))."
        )
    ran = [part for part in told["parts"] if had_gpu(part)]
    names = {part["part"]: part for part in ran}
    places = "; ".join(dict.fromkeys(where(part) for part in ran))
    words = [f"- On a GPU ({places}, {told['made']}) these parts of `make test-gpu`"]
    for verb, wanted in (("passed", True), ("failed", False)):
        chosen = [name for name, part in names.items() if (part["status"] == PASSED) is wanted]
        words.append(f"{verb}: {', '.join(chosen) or 'none'};")
    slow = [name for name, part in names.items() if any(map(is_missed, part["lines"]))]
    words.append(f"did not reach every goal of speed: {', '.join(slow) or 'none'};")
    words.append(f"did not run: {', '.join(n for n in PARTS if n not in names) or 'none'}")
    return "\n  ".join(words) + " ([GPU](docs/gpu.md))."


def is_missed(line: dict[str, Any]) -> bool:
    return bool(line["result"] == MISSED)


def where(part: dict[str, Any]) -> str:
    machine = part["machine"]
    return f"{machine['device']}, torch {machine['torch']}"


def markdown(told: dict[str, Any] | None) -> str:
    """Return the page."""
    if told is None:
        rows = [f"| {name} | {part.title} | not run |" for name, part in PARTS.items()]
        text = f"**{NEVER}.** There is no table so far."
        return "\n".join([_HEAD, text, "", "| part | what | |", "|---|---|---|", *rows, ""])
    by_name = {part["part"]: part for part in told["parts"]}
    rows = ["| part | what | | lines |", "|---|---|---|---|"]
    for name, part in PARTS.items():
        one = by_name.get(name)
        ran = one is not None and had_gpu(one)
        status = " ".join(filter(None, (one["status"], one["note"]))) if one else "not run"
        rows.append(f"| {name} | {part.title} | {status} | {summary(one) if ran else ''} |")
    ran = [by_name[name] for name in PARTS if name in by_name and had_gpu(by_name[name])]
    machines = "; ".join(dict.fromkeys(part["machine"]["words"] for part in ran))
    text = f"Of {told['made']}, on {machines}."
    sections = [line for part in ran for line in _section(part)]
    return "\n".join([_HEAD, text, "", *rows, *sections, ""])


def _section(part: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"## {part['part']}: {PARTS[part['part']].title}", "")
    yield f"{part['status']}, {sum(part['seconds'].values()):.0f} s, on {where(part)}."
    if "remark" in part:  # that somebody has added to the table, and that goes with it
        yield from ("", part["remark"])
    shown = [line for line in part["lines"] if line["result"] != PASSED or "values" in line]
    plain = [line for line in part["lines"] if line not in shown]
    if plain:
        cases = dict.fromkeys(line["case"] for line in plain)
        yield from ("", f"Passed: {len(plain)} lines of {', '.join(cases)}.")
    if not shown:
        return
    yield from ("", "| case | what | figure | goal | |", "|---|---|---|---|---|")
    order = (FAILED, VOID, MISSED, PASSED, SKIPPED)
    for line in sorted(shown, key=lambda line: order.index(line["result"])):
        cells = (line["case"], line["what"], line["text"], line.get("goal", ""), line["result"])
        yield "| " + " | ".join(cell_of(cell) for cell in cells) + " |"


def cell_of(text: str) -> str:
    """Return a text as one cell of a Markdown table."""
    lines = text.splitlines() or [""]
    return lines[-1][:200].replace("|", "\\|")


def main() -> None:
    """Write the page and the README's sentence from docs/gpu.json."""
    told = read()
    PAGE.write_text(markdown(told))
    README.write_text(readme(README.read_text(), told))


if __name__ == "__main__":
    main()
