"""Writes the page of the benchmark: what was run and what is missing, then the tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import tables
from benchmarks.detection.breadth import BREADTH
from benchmarks.detection.faults import FAULTS
from benchmarks.detection.fresh import FRESH
from benchmarks.detection.habits import HABITS
from benchmarks.detection.habits_blind import HABITS_BLIND
from benchmarks.detection.habits_blind_three import HABITS_BLIND_THREE
from benchmarks.detection.habits_blind_two import HABITS_BLIND_TWO
from benchmarks.detection.healthy import HEALTHY, Healthy
from benchmarks.detection.jobs import APART, PLANTED
from benchmarks.detection.results import Key, Result
from benchmarks.detection.rivals import RIVALS
from benchmarks.detection.score import Outcome, Spoke, wilson
from benchmarks.detection.set_a import SET_A
from benchmarks.detection.set_b import SET_B
from benchmarks.detection.set_c import SET_C
from benchmarks.detection.set_d import SET_D
from benchmarks.detection.set_e import SET_E
from benchmarks.detection.set_f import SET_F
from benchmarks.detection.set_g import SET_G
from benchmarks.detection.set_h import SET_H
from benchmarks.detection.set_i import SET_I
from benchmarks.detection.set_j import SET_J
from benchmarks.detection.set_k import SET_K
from benchmarks.detection.set_l import SET_L
from benchmarks.detection.sharded import SHARDED
from benchmarks.detection.unlisted import LEARNED
from benchmarks.detection.zoo import ZOO
from ddpprobe.detectors.suite import DETECTORS

EVERY = (1, 10)
_TITLE = """# What the verdict finds

Real jobs on 1 to 4 ranks: {faults} runs with one planted fault and {healthy} healthy ones, of
{seeds} seed(s), sampled at every step and at every 10th. Measured on {machines},
{dates}, by `make bench-detection`. Step, rank, module and magnitude are drawn by seed; nothing is
announced, no setting is changed.

A fault is found if a detector that is meant for it warns or pages, within the limit (steps; at the
interval of 10 at least 5 sampled steps). `rank` and `module`: named rightly, where they are asked
for. All nets are tiny, on CPU cores, 300 steps: a floor, not a claim.
"""

_BY_DETECTOR = """## By detector

Over all runs of this page, those that no list had and those under FSDP2 among them: runs with a
fault that a detector is meant for; those in which it was the first of them to speak, in time; those
that it or another one found in time; and the healthy runs in which it spoke. A fault is often meant
for several, the first of which takes it. What each looks at, and what it cannot tell:
[detectors](reference/detectors.md).
"""
_LIMITS = """## What a probe of statistics cannot see

TrainCheck (Jiang et al., OSDI 2025) learns invariants over calls and variables from programs that
are right, and reports that it found 18 of 20 silent errors of real programs within one iteration.
ddpprobe was not run on those programs. By their descriptions about 10 of the 18 leave a trace in
what ddpprobe records: gradients that are not reduced any more, ranks that drift apart, tensors
that become zero, weights that stand still. That is an estimate, not a measurement. The others are
wrong uses of an interface whose numbers look like those of a healthy run: a transformation that is
applied twice, an argument that is ignored. No threshold finds them; invariants of the program may.
In turn ddpprobe needs no other program to learn from.
"""
_UNLISTED = """
## The third ten that no list had

Written when the detectors were there, and before any of them was run: 13 of 30 were found then at
every=1, and 13 of 30 at every=10. Since then `grad_zeros` was made from what U26 and U30 showed,
and `level_shift` with U01 to U30 in view, at seeds 0 and 1; U28 was planted in another way, as it
had stopped the count of its rank's steps."""
_LEARNED = """
## Faults that were learned from

Two times ten that had been such once, before rules were made from what they showed. Of the first
ten (U01 to U10) 16 of 30 were found at every=1 and 14 of 30 at every=10 then, of the second ten 18
and 17."""
_SET_L = """
## Set L: written without the rules

Ten more faults, written on 2026-11-28 by somebody who had not read the rules, of which several
projects report each; the code names them, and how much it harms. Five begin in the middle of
training, and five are there from the first step. When it was run first, 3 of 10 were found at
every=1, and 2 of 10 at every=10 (seed 0): of those that begin in the middle 3 and 2, of the others
none. Two rules were made from it since (U142, U148)."""
_SET_K = """
## Set K: written without the rules

Ten more faults, written on 2026-11-28 by somebody who had not read the rules, from issue trackers.
Five begin in the middle of training, and five are there from the first step. The code names the
source of each, and how much it harms. When it was run first, 6 of 10 were found at every=1, and 7
of 10 at every=10 (seed 0): of those that begin in the middle 4 and 5, of those that are there from
the first step 2 and 2. One rule was made from it since (U131)."""
_SET_J = """
## Set J: written with the rules at hand, and before it was run

By the one who had just changed `loss_runaway`: 6 of 10 were found at every=1, and 4 of 10 at
every=10 (seed 0). The second loss of U129 was ten times as large then, and its training blew up by
itself, which was told. Four rules were made from it since (U124 to U127)."""
_SET_I = """
## Set I: written without the rules, like set H

The other ten of the twenty that set H is from. When no rule had been made from either, 8 of 20 were
found at every=1, and 8 of 20 at every=10 (seeds 0 and 1). Three rules were made from it since
(U107, U114, U120)."""
_SET_H = """
## Set H: written without the rules, and with `cross_entropy`

Twenty faults from issue trackers once more, ten of which begin in the middle of training, by
somebody who had not read the rules; a lot split them. When no rule had been made from either set, 9
of 20 were found at every=1, and 9 of 20 at every=10 (seeds 0 and 1): of the twenty, 6 of those that
begin in the middle, and 2 or 3 of those that are there from the first step. Two rules were made
from it since (U102, U109), and one that was blind was mended (U118)."""
_SET_G = """
## Set G: written without the rules, after the others

Ten more faults from issue trackers, by somebody who had not read the rules and ran none of them
with the probe before it was written: five that begin in the middle of training, and five mistakes
of configuration. The code names the source of each, and how much it harms. When no rule had been
made from it, 12 of 30 were found at every=1, and 13 of 30 at every=10; two rules were since."""
_SET_F = """
## Set F: written without the rules, by how often people report it

The other ten of the twenty that set E is from. When no rule had been made from either, 9 of 30 were
found at every=1, and 9 of 30 at every=10; two rules were since."""
_SET_E = """
## Set E: written without the rules, by how often people report it

Twenty faults that were drawn from issue trackers, forums and papers by how often people ask for
help with such a thing, by somebody who had not read the rules, and split by lot. When no rule had
been made from either set, 14 of 30 were found at every=1, and 12 of 30 at every=10: half of the
twenty are there from the first step on, where no past is left. Three rules were made since."""
_SET_D = """
## Set D: written without the rules, like set C

The other ten of the twenty that set C is from. When no rule had been made from either, 15 of 30
were found at every=1, and 15 of 30 at every=10; two rules were made from them since. Two (U62, U67)
leave no trace in what a rank computes in training: they stand for what nobody here sees."""
_SET_C = """
## Set C: written without the rules

Twenty faults once more, drawn and split as those of sets A and B were, by somebody who had read
neither the detectors' rules nor what they found. Each was seen to harm its job: the code says of
each how much worse its loss became, or what was learned, than without it. When no rule had been
made from them, 16 of 30 were found at every=1, and 13 of 30 at every=10; four rules were since."""
_SET_B = """
## Set B: written without the rules

Twenty more faults were drawn from papers and issue trackers by somebody who had not read the
detectors' rules, and who ran none of them with the probe; each names its source in the code. A lot
split them into two sets. When no rule had been made from these ten, 21 of 30 were found at
every=1, and 14 of 30 at every=10; two rules were since, and `collapse`, which was planned."""
_SET_A = """
## Set A: written without the rules

The other ten of the twenty. 13 of 30 were found at every=1 and 10 of 30 at every=10 when they were
run first; three rules were made from what they showed: gradients that are divided twice, a norm of
one weight that moves further than ever, and half of all outputs that move together. `collapse`,
which was planned, came last."""
_SHARDED = """
## The faults under FSDP2

The same faults on shards, on two ranks or more, where they mean something there; not in the
tables above."""
_ZOO = """Small configurations of models of transformers and timm, from random weights, on a task
that can be learned, by a usual recipe: AdamW, warm-up and cosine, gradients clipped at 1.
"""

_BLIND = """24 kinds of training on one to three ranks, by somebody who had not read the rules: each
is a way that people train, and that a watcher may take for a fault. When they were run first (seeds
0 and 1, both intervals) 2 of 96 runs had a page, and 7 a page or a warning: post-local SGD by
`no_sync` (W20), a loss of two numbers that was taken for another one (W21), and a gradient of an
LSTM that spikes (W16). The first two were mended since.
"""

_BLIND_TWO = """16 more by another one who had not read them, after that. When they were run first
(seeds 0 and 1, both intervals) none of 64 runs had a page, and 4 a warning: GRPO, whose loss
begins at zero and only grows (W27), and windows of a growing series, which share their extremes
(W35). Both were mended since.
"""

_BLIND_THREE = """20 more by a third one who had not read them, after that. When they were run first
(seeds 0 and 1, both intervals) none of 80 runs had a page, and 2 a warning, of one kind: a model
that is given its targets beside its input, and shifts them itself (W56). That was mended since.
"""

# What stands in a table of its own, the newest first, and what is said above it.
_APART = (
    (SET_L, _SET_L),
    (SET_K, _SET_K),
    (SET_J, _SET_J),
    (SET_I, _SET_I),
    (SET_H, _SET_H),
    (SET_G, _SET_G),
    (SET_F, _SET_F),
    (SET_E, _SET_E),
    (SET_D, _SET_D),
    (SET_C, _SET_C),
    (SET_B, _SET_B),
    (SET_A, _SET_A),
    (FRESH, _UNLISTED),
    (LEARNED, _LEARNED),
    (SHARDED, _SHARDED),
)


def page(results: Sequence[Result], missing: Sequence[Key]) -> str:
    """Return the page, in Markdown.

    Args:
        results: of this code, in any order.
        missing: runs that were asked for and have none; the page names them first.
    """
    outcomes = [(r.outcome, r.spoke) for r in results]
    faulty = sum(o.found is not None for o, _ in outcomes)
    title = _TITLE.format(
        faults=faulty, healthy=len(outcomes) - faulty, seeds=len({o.seed for o, _ in outcomes}),
        machines=" and ".join(sorted({r.machine for r in results})) or "no machine yet",
        dates=" to ".join(sorted({min(days), max(days)})) if (days := [r.date for r in results])
        else "never",
    )  # fmt: skip
    return "\n".join([title, *_gaps(len(results), missing), *_report(outcomes)])


def _gaps(there: int, missing: Sequence[Key]) -> Iterator[str]:
    if not missing:
        return
    yield (
        f"**Not complete: {len(missing)} of {there + len(missing)} runs are missing**, so no share "
        "below is one of the whole. What is missing:\n"
    )
    for seed in sorted({k.seed for k in missing}):
        for every in EVERY:
            names = [k.job for k in missing if (k.seed, k.every) == (seed, every)]
            if names:
                yield f"- seed {seed}, every={every}: {', '.join(names)}"
    yield ""


def _report(outcomes: Sequence[tuple[Outcome, Spoke]]) -> Iterator[str]:
    """Yield the tables."""
    apart = [o for o, _ in outcomes if o.job in APART]
    outcomes = [pair for pair in outcomes if pair[0].job not in APART]
    mine = [o for o, _ in outcomes]
    faulty = [o for o in mine if o.found is not None]
    healthy = [o for o in mine if o.found is None]
    yield "## In one table\n"
    rows = [_line("ddpprobe", mine), *(_rival_line(rival, outcomes) for rival in RIVALS)]
    header = (
        "",
        "found, every=1",
        "found, every=10",
        "spoke in healthy runs",
        "paged in healthy runs",
    )
    yield tables.table(header, rows)
    late = [o.late for o in faulty if o.late is not None]
    ranks = [o.rank for o in faulty if o.rank is not None]
    modules = [o.module for o in faulty if o.module is not None]
    yield (
        f"\nOf what was found: the rank was named rightly in {wilson(sum(ranks), len(ranks))}, the "
        f"module in {wilson(sum(modules), len(modules))}; latency in steps: median "
        f"{statistics.median(late) if late else '-'}, 90 % within {_p90(late)}.\n"
    )
    yield from _by_detector([*mine, *apart])
    yield "\n## The faults\n"
    yield tables.table(
        ("", "what is planted", "limit", *(f"every={e}" for e in EVERY), "by", "rank", "module"),
        [_fault_row(name, [o for o in faulty if o.job == name]) for name in FAULTS],
    )
    for faults, text in _APART:
        yield from _faults_apart(apart, faults, text)
    yield "\n## The healthy runs\n"
    yield _healthy_table(HEALTHY, healthy)
    for heading, kinds, text in (
        ("in other ways to train", BREADTH, ""),
        ("in other habits", HABITS, ""),
        ("written without the rules", HABITS_BLIND, _BLIND),
        ("written without the rules, once more", HABITS_BLIND_TWO, _BLIND_TWO),
        ("written without the rules, a third time", HABITS_BLIND_THREE, _BLIND_THREE),
        ("of real architectures", ZOO, _ZOO),
    ):
        some = [o for o in apart if o.job in kinds]
        yield f"\n## Healthy runs {heading}\n"
        if text:
            yield text
        yield _spoken(some)
        yield _healthy_table(kinds, some)
    early = [o for o in (*faulty, *apart) if o.found is not None and (o.pages or o.warns)]
    told = "; ".join(f"{o.job} seed {o.seed}: {', '.join(o.pages + o.warns)}" for o in early)
    yield f"\nBefore a fault had begun, something was said in {len(early)} runs. {told}\n"
    yield _LIMITS


def _by_detector(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield what each detector found, of all faults and healthy runs on the page."""
    yield _BY_DETECTOR
    faulty = [(o, PLANTED[o.job].expected.detectors) for o in outcomes if o.found is not None]
    healthy = [o for o in outcomes if o.found is None]
    rows: list[list[object]] = []
    for name in (*(d.name for d in DETECTORS), "rank_lost"):
        meant = [o for o, detectors in faulty if name in detectors]
        late = [o.late for o in meant if o.by == name and o.late is not None]
        spoke = [
            sum(any(a.startswith(f"{name}@") for a in told) for told in of)
            for of in ([o.pages for o in healthy], [o.warns for o in healthy])
        ]
        latency = f"{round(statistics.median(late))}, {_p90(late)}" if late else "-"
        found = sum(bool(o.found) for o in meant)
        rows.append([f"`{name}`", len(meant), len(late), found, latency, *spoke])
    yield tables.table(
        ("", "meant for it", "found by it first", "found by any", "steps: median, 90 %",
         f"paged in {len(healthy)} healthy runs", "warned"),
        rows,
    )  # fmt: skip


def _faults_apart(
    outcomes: Sequence[Outcome], kinds: Mapping[str, object], text: str
) -> Iterator[str]:
    """Yield what was found of faults that are counted apart."""
    some = [o for o in outcomes if o.job in kinds]
    found = [sum(bool(o.found) for o in some if o.every == e) for e in EVERY]
    runs = [sum(o.every == e for o in some) for e in EVERY]
    shares = "; ".join(
        f"every={e}: {wilson(n, of)}" for e, n, of in zip(EVERY, found, runs, strict=True) if of
    )
    yield f"{text} Found at {shares or 'no interval: not run'}.\n"
    yield tables.table(
        ("", "what is planted", "limit", *(f"every={e}" for e in EVERY), "by", "rank", "module"),
        [_fault_row(name, [o for o in some if o.job == name]) for name in kinds],
    )


def _spoken(some: Sequence[Outcome]) -> str:
    paged, warned = (sum(bool(x) for x in of) for of in ([o.pages for o in some],
                                                         [o.warns for o in some]))  # fmt: skip
    return f"{len(some)} runs: {paged} with a page, {warned} with a warning.\n"


def _healthy_table(kinds: Mapping[str, type[Healthy]], some: Sequence[Outcome]) -> str:
    return tables.table(
        ("", "why somebody may think it is not", "runs", "pages", "warnings"),
        [_healthy_row(name, kind.trap, [o for o in some if o.job == name])
         for name, kind in kinds.items()],
    )  # fmt: skip


def _line(name: str, mine: Sequence[Outcome]) -> list[str]:
    found = []
    for every in EVERY:
        some = [o.found for o in mine if o.found is not None and o.every == every]
        found.append(wilson(sum(some), len(some)))
    healthy = [o for o in mine if o.found is None]
    spoke = sum(bool(o.pages or o.warns) for o in healthy)
    paged = sum(bool(o.pages) for o in healthy)
    return [name, *found, wilson(spoke, len(healthy)), wilson(paged, len(healthy))]


def _rival_line(rival: str, outcomes: Sequence[tuple[Outcome, Spoke]]) -> list[str]:
    """A rival finds a fault when it says anything after it that it had not said before."""
    found = []
    for every in EVERY:
        hits = runs = 0
        for o, spoke in outcomes:
            if o.found is None or o.every != every:
                continue
            fault = FAULTS[o.job](o.seed, 0)
            limit = max(fault.expected.within, (1, 5)[every > 1] * every)
            runs += 1
            hits += any(fault.start <= s <= fault.start + limit for s in spoke[rival]) and not any(
                s < fault.start for s in spoke[rival]
            )
        found.append(wilson(hits, runs))
    quiet = [spoke[rival] for o, spoke in outcomes if o.found is None]
    return [rival, *found, wilson(sum(map(bool, quiet)), len(quiet)), "-"]


def _fault_row(name: str, some: Sequence[Outcome]) -> list[object]:
    fault = PLANTED[name]
    found = []
    for every in EVERY:
        of = [o for o in some if o.every == every]
        if not of:
            found.append("not run")
            continue
        late = [o.late for o in of if o.late is not None]
        behind = f", +{round(statistics.median(late))}" if late else ""
        found.append(f"{sum(bool(o.found) for o in of)}/{len(of)}{behind}")
    named = [
        "-" if not (told := [v for o in some if (v := getattr(o, what)) is not None])
        else f"{sum(told)}/{len(told)}"
        for what in ("rank", "module")
    ]  # fmt: skip
    by = ", ".join(sorted({f"`{o.by}`" for o in some if o.by})) or "-"
    return [name, fault.says, fault.expected.within, *found, by, *named]


def _healthy_row(name: str, trap: str, some: Sequence[Outcome]) -> list[object]:
    pages = [p.partition("@")[0] for o in some for p in o.pages]
    warns = [w.partition("@")[0] for o in some for w in o.warns]
    said = ", ".join(sorted({f"`{w}`" for w in warns}))
    told = f"{sum(bool(o.warns) for o in some)}{f' ({said})' if said else ''}"
    return [name, trap, *([len(some), len(pages), told] if some else ["not run"] * 3)]


def _p90(late: Sequence[int]) -> object:
    return sorted(late)[int(0.9 * (len(late) - 1))] if late else "-"
