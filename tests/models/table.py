"""docs/reference/models.md: every model, what was compared, and what that means."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from math import ceil, log10
from pathlib import Path

from tests.models.judge import Outcome
from tests.models.listed import find
from tests.models.training import STEPS

PAGE = Path(__file__).absolute().parents[2] / "docs" / "reference" / "models.md"

_HEAD = """# Models: what is exact on models of others

`make test-models` writes this page. Each row is one model as its library has it, built small from
its configuration, from random weights, and trained for {steps} steps on the CPU (AdamW, float32,
every step sampled). `make test-models MODEL=Llama` takes those whose title holds the word.

**{models} models of {libraries} libraries: {right} right, {wrong} not.** {rows} rows of statistics
were compared, and {named} of {faults} faults were named; {ddp} models were trained by two ranks
under DDP.

Tried with {versions}.

- **ranks**: with 2 under `DistributedDataParallel` (gloo).
- **training**: *identical*: the bits of losses, parameters, buffers, optimizer state and random
  states, with the probe and without it, on every rank.
- **sites**: tensors that passed a hook in a step: outputs of modules, gradients with respect to
  them, gradients of parameters before and after the reduction, parameters after the step, and
  what the step changed of them.
- **rows**: how many rows of the {steps} steps, merged over the ranks, were compared with plain
  torch hooks in a process that has not imported ddpprobe: the counts (elements, NaN, +Inf, -Inf,
  zeros, calls) are equal, minimum, maximum, sum and sum of squares within 1e-6 (of the largest
  magnitude, of the sum of magnitudes, of the sum of squares; of `update`, and what rounding in a
  weight is of its change). Mean, largest magnitude and the other derived statistics follow from
  these. Rows of `param` and `update` [take turns](python.md) in models of more than 4 MiB. A row
  that is missing, or that no hook knows of, is an error.
- **error**: the next power of ten above the worst of these.
- **forward**, **backward**: a NaN is born in the output of a module drawn at random, and, in
  another run, in the gradient with respect to the output of one; in DDP on the last rank. *named*:
  the verdict has one first cause, and it is that step, rank, phase and module.
- **time**: of all trainings of the model.

| library | model | ranks | training | sites | rows | error | forward | backward | time |
|---|---|---|---|---|---|---|---|---|---|
"""


def write(outcomes: Sequence[Outcome]) -> None:
    """Write the page."""
    PAGE.write_text(render(outcomes))


def listed() -> list[str]:
    """Return the titles of the models on the page."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [f"{row[1].strip()} {row[2].strip()}" for row in rows[1:]]


def render(outcomes: Sequence[Outcome]) -> str:
    """Return the whole page."""
    libraries = list(dict.fromkeys(find(outcome.title).library for outcome in outcomes))
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    head = _HEAD.format(
        steps=STEPS, models=len(outcomes), libraries=len(libraries), right=len(outcomes) - wrong,
        wrong=wrong, rows=sum(outcome.rows for outcome in outcomes),
        named=sum(len(outcome.named) for outcome in outcomes), faults=2 * len(outcomes),
        ddp=sum(outcome.world > 1 for outcome in outcomes),
        versions=", ".join(f"{name} {metadata.version(name)}" for name in libraries),
    )  # fmt: skip
    return head + "".join(_row(outcome) + "\n" for outcome in outcomes)


def _row(outcome: Outcome) -> str:
    one = find(outcome.title)
    faults = ("named" if phase in outcome.named else "no" for phase in ("forward", "backward"))
    cells = (
        one.library, one.name, outcome.world, "identical" if outcome.same else "differs",
        outcome.sites, outcome.rows, _bound(outcome.worst), *faults, f"{outcome.seconds:.0f} s",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _bound(error: float) -> str:
    """Return the next power of ten, so that the page does not change with the processor."""
    return "0" if error < 1e-12 else f"1e{ceil(log10(error)):d}"
