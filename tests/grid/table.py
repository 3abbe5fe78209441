"""docs/reference/coverage.md: every cell, its result, and what the figures mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil, log10
from pathlib import Path
from typing import Any

from tests.grid.axes import AXES, CONSTRAINTS, Cell, cells
from tests.grid.judge import NOISE, TOLERANCE

PAGE = Path(__file__).absolute().parents[2] / "docs" / "reference" / "coverage.md"
Results = Mapping[str, Mapping[str, Any]]

_HEAD = """# Coverage: what is exact under which wrapper

`make test-grid` writes this page. Each row is one small training job on real ranks (gloo, CPU). The
statistics of every site (kinds `output`, `grad_output`, `grad_local`, `grad`, `param`, `update`
and, where nothing is computed again, floating `buffer`), merged over the ranks, are compared with a
single process that trains the unsharded model on the same data and is observed by plain torch
hooks, in float64: the counts (elements, NaN, +Inf, -Inf, zeros, calls) must be equal, minimum,
maximum, sum and sum of squares within a tolerance. The reference must also end with the weights
that the wrapped model has learnt without a probe, so it is known to describe the same training.
"""

_COLUMNS = """
- **result**: *exact*: every site equals the reference. *limited*: so do all but those named under
  the letter, which are labelled or reported as unobserved, never as a wrong number (in brackets:
  how many rows of all steps). *refused*: `install()` says so on every rank.
- **error**: the next power of ten above the worst relative error of all sites, steps and
  statistics (but those of `update`, which may be off by the rounding of the weight besides): of
  minimum and maximum relative to the tensor's largest magnitude, of sums relative to
  the sum of magnitudes.
- **training**: whether parameters, optimizer state and random states are bit-identical with and
  without the probe, on every rank.
- **fault**: a NaN is born in the output of one module on one rank in one micro-batch, and, in
  another step, in the gradient of one module's output. *named*: rank, phase, micro-batch and module
  of the merged record are right for both; *in part*: rank, phase and micro-batch are, on a step
  that was not sampled.
- **graphs**, **breaks**: what `torch.compile` (aot_eager) made
  without and with the probe: graphs, and different reasons to break them. (Inductor fuses
  operators: see [graphs of torch.compile](python.md#graphs-of-torchcompile).)
"""


def write(results: Results) -> None:
    """Write the page."""
    PAGE.write_text(render(results))


def listed() -> list[str]:
    """The names of the cells on the page."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    names = [" ".join(part.strip() for part in row[1 : 1 + len(_ORDER)]) for row in rows]
    known = set(AXES["wrapper"])
    return [name for name in names if name.split()[0] in known]


_KINDS = ("exact", "limited", "refused", "failed")
_NAMED = ("named", "named (rank, phase), named")
_ORDER = tuple(Cell.__dataclass_fields__)


def render(results: Results) -> str:
    """The whole page; the same text for the same results."""
    limits = _limits(results)
    letters = {limit: f"{chr(97 + i)}" for i, limit in enumerate(limits)}
    rows = [_row(cell, results[cell.name], letters) for cell in cells()]
    kinds = Counter(_kind(results[cell.name]) for cell in cells())
    names = ", ".join(f"{kinds[kind]} {kind}" for kind in _KINDS if kinds[kind])
    sites = sum(outcome.get("sites", 0) for outcome in results.values())
    same = sum(bool(results[cell.name].get("same")) for cell in cells())
    named = sum(results[cell.name].get("faults", "") in _NAMED for cell in cells())
    header = [*_ORDER, "result", "error", "training", "fault", "graphs", "breaks"]
    return "\n".join(
        [
            _HEAD,
            f"**{len(rows)} cells: {names}.** Training is bit-identical in {same}, both faults are",
            f"named in {named}; {sites} rows of statistics were compared.",
            "",
            *_worst(results),
            _COLUMNS,
            "| " + " | ".join(header) + " |",
            "|" + "---|" * len(header),
            *rows,
            "",
            "## Limits and refusals",
            "",
            *(f"- **{letter}**: {limit}." for limit, letter in letters.items()),
            "",
            *_tolerance(),
            "",
            "## How the cells are chosen",
            "",
            "Every pair of values of two axes that some valid cell can hold stands in at least one",
            "cell, plus corners chosen by hand. Not valid is what torch itself refuses or does",
            "wrongly, and what means nothing:",
            "",
            *(f"- {' x '.join(c.axes)}: {c.reason}" for c in CONSTRAINTS),
            "",
        ]
    )


def _kind(outcome: Mapping[str, Any]) -> str:
    return "failed" if outcome["problems"] else outcome["result"].partition(":")[0]


def _limits(results: Results) -> list[str]:
    found = {
        limit
        for outcome in results.values()
        if _kind(outcome) in ("limited", "refused")
        for limit in _parts(outcome)
    }
    return sorted(found)


def _parts(outcome: Mapping[str, Any]) -> list[str]:
    kind, _, text = outcome["result"].partition(": ")
    return [f"refused: {text}"] if kind == "refused" else text.split("; ")


def _row(cell: Cell, outcome: Mapping[str, Any], letters: Mapping[str, str]) -> str:
    kind = _kind(outcome)
    if kind == "limited":
        kind += f" ({outcome['limited']})"
    if kind.startswith(("limited", "refused")):
        kind += " " + " ".join(letters[part] for part in _parts(outcome))
    refused = kind.startswith("refused")
    faults = outcome["faults"].replace("named (rank, phase)", "in part")
    found = [
        kind,
        "" if refused else _bound(outcome["worst"]),
        "" if refused else "identical" if outcome["same"] else "differs",
        faults,
        _pair(outcome["graphs"]) if cell.engine != "eager" else "",
        _pair(outcome["breaks"]) if cell.engine != "eager" else "",
    ]
    return "| " + " | ".join([*(str(getattr(cell, axis)) for axis in _ORDER), *found]) + " |"


def _pair(values: list[int]) -> str:
    return " → ".join(map(str, values))


def _bound(error: float) -> str:
    """The next power of ten, so that the page does not change with the processor."""
    return "0" if error < 1e-12 else f"1e{ceil(log10(error)):d}"


def _worst(results: Results) -> list[str]:
    lines = ["| precision | tolerance | worst error |", "|---|---|---|"]
    for precision in AXES["precision"]:
        errors = [
            results[cell.name]["worst"] for cell in cells() if cell.precision == precision
        ]  # fmt: skip
        lines.append(f"| {precision} | {TOLERANCE[precision]:.1e} | {_bound(max(errors))} |")
    return lines


def _tolerance() -> list[str]:
    fp32, bf16, fp16 = (f"{TOLERANCE[p]:.1e}" for p in ("fp32", "autocast", "scaler"))
    text = f"""## Tolerances

fp32: {fp32}. What differs is the order in which a reduction adds the ranks' gradients, and how a
sharded matrix product splits its sums: some ulps (6e-8) each, and what three steps make of them.

bf16 autocast and MixedPrecision: 2^-6 ({bf16}). bf16 has 8 bits: one unit in the last place is 2^-8
of a value. An ulp of difference in a float32 weight can round to the neighbouring bf16 number, and
a sum of such values moves by as much. fp16 under a GradScaler has 11 bits: 2^-9 ({fp16}) for the
same reason.

Counts are equal in all precisions. One exception is made for `zeros` of gradients: elements that
cancel are rounding noise (in float32 only those that cancel in theory: the key bias of attention).
One below {NOISE["fp32"]:.0e} of its tensor's largest magnitude (low precision: below the tolerance)
may be 0 on one side only."""
    return text.splitlines()
