"""Lays out one look at a run as lines that fit a terminal; names in it are not trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from ddpprobe.cli.names import shortened
from ddpprobe.cli.output import table
from ddpprobe.reader.live.live_view import LiveView, RankNow, SiteNow
from ddpprobe.reader.text import UNOBSERVED, number, plain, size

Line = tuple[str, str]  # what the line is about, one of `STYLES`, and its text
STYLES = {"": "", "title": "bold", "head": "dim", "bad": "red", "odd": "yellow", "note": "cyan"}
_OF_STATE = {
    "dead": "bad",
    "late": "bad",
    "starting": "note",
    "unknown": "note",
    "paused": "note",
    "closed": "head",
}
# A daemon's metrics leave out a site that has no number.
NOTHING_FINITE = "no site had a finite value at the newest sampled step"
_GUILTY = "  (first cause)"
_LEAST_NAME = 24  # characters of a module's name, whatever the width
_LEAST_ROWS = 3  # of each table, whatever the height


@dataclass(frozen=True, slots=True)
class RankColumn:
    """A column of ranks; those with the highest `drop` go first where the terminal is narrow."""

    name: str
    drop: int
    text: Callable[[RankNow], str]
    right: bool = True


COLUMNS = (
    RankColumn("rank", 0, lambda r: str(r.rank)),
    RankColumn("state", 0, lambda r: f"{r.state} {r.why}".rstrip(), right=False),
    RankColumn("step", 0, lambda r: _known(r.step)),
    RankColumn("step/s", 1, lambda r: UNOBSERVED if r.rate is None else f"{r.rate:.3g}"),
    RankColumn("phase", 5, lambda r: f"{r.phase[0]} {r.phase[1]:.0%}" if r.phase else UNOBSERVED,
           right=False),
    RankColumn("loss", 2, lambda r: _number(r.loss)),
    RankColumn("local norm", 1, lambda r: _number(r.grad_norm)),
    RankColumn("memory", 4, lambda r: UNOBSERVED if r.resident_bytes is None
           else size(r.resident_bytes)),
    RankColumn("cpus", 6, lambda r: UNOBSERVED if r.cpus is None else f"{r.cpus:.2f}"),
    RankColumn("device", 7, lambda r: r.device or UNOBSERVED, right=False),
    RankColumn("pages", 3, lambda r: _known(r.pages)),
    RankColumn("seen", 2, lambda r: UNOBSERVED if r.seen is None else ago(r.seen)),
)  # fmt: skip


def frame(now: LiveView, width: int, height: int) -> list[Line]:
    """Return at most `height` lines of at most `width` cells."""
    head = [("title", _title(now)), ("head", " · ".join(_host(now)))]
    notes = [("note", note) for note in now.notes]
    left = max(0, height - len(head) - len(notes) - 6)  # three headings, three blank lines
    tall = min(len(now.anomalies) or 1, max(_LEAST_ROWS, left // 4))
    wide = min(len(now.sites) or 1, max(_LEAST_ROWS, (left - tall) // 2))
    deep = min(len(now.ranks) or 1, max(_LEAST_ROWS, left - tall - wide))
    wide = max(wide, min(len(now.sites), left - tall - deep))  # what the ranks do not need
    lines: list[Line] = [*head, *notes, ("", ""), *_ranks(now.ranks, deep, width)]
    lines += [("", ""), *_sites(now, wide, width), ("", ""), *_anomalies(now, tall)]
    return [(style, cut(plain(text), width)) for style, text in lines[:height]]


def cut(text: str, width: int) -> str:
    """Shorten a text to so many cells of a terminal; wide characters take two."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def ago(seconds: float) -> str:
    """Format an age in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _title(now: LiveView) -> str:
    known = [r.step for r in now.ranks if r.step is not None]
    steps = f"step {max(known)}" if known else "no step yet"
    norm = "" if now.grad_norm is None else f" · reduced grad norm {_number(now.grad_norm)}"
    sampled = "" if now.sampled_step is None else f" · last sampled {now.sampled_step}"
    late = sum(r.state == "late" for r in now.ranks)
    state = f"{now.state}, {late} late" if late else now.state
    ranks = f"{now.world_size} rank{'' if now.world_size == 1 else 's'}"
    return f"{now.name or now.source} · {state} · {ranks} · {steps}{sampled}{norm}"


def _host(now: LiveView) -> Iterator[str]:
    yield now.source
    host = now.host
    if "cpu_ratio" in host:
        yield f"cpu {host['cpu_ratio']:.0%}"
    if "memory_available_bytes" in host:
        yield f"memory free {size(host['memory_available_bytes'])}"
    if "disk_free_bytes" in host:
        yield f"disk free {size(host['disk_free_bytes'])}"


def _ranks(ranks: Sequence[RankNow], most: int, width: int) -> Iterator[Line]:
    if not ranks:
        yield "note", "no rank has said anything yet"
        return
    rest = len(ranks) > most
    shown = ranks[: most - 1] if rest else ranks
    columns = list(COLUMNS)
    while True:
        rows = [[c.name for c in columns], *([c.text(r) for c in columns] for r in shown)]
        lines = table(rows, right=[i for i, c in enumerate(columns) if c.right])
        droppable = max(columns, key=lambda c: c.drop)
        if max(map(len, lines)) <= width or not droppable.drop:
            break
        columns.remove(droppable)
    yield "head", lines[0]
    for rank, line in zip(shown, lines[1:], strict=True):
        yield _OF_STATE.get(rank.state, "odd" if rank.pages else ""), line
    if rest:
        yield "head", _summary(ranks[most - 1 :])


def _summary(ranks: Sequence[RankNow]) -> str:
    """Say in one line what the ranks that do not fit are at."""
    states = dict.fromkeys(r.state for r in ranks)
    parts = [f"{sum(r.state == s for r in ranks)} {s}" for s in states]
    steps = [r.step for r in ranks if r.step is not None]
    if steps:
        parts.append(f"steps {min(steps)} to {max(steps)}")
    seen = [r.seen for r in ranks if r.seen is not None]
    if seen:
        parts.append(f"seen {ago(max(seen))} ago at most")
    return f"and {len(ranks)} more: {', '.join(parts)}"


def _sites(now: LiveView, most: int, width: int) -> Iterator[Line]:
    if not now.sites:
        none = NOTHING_FINITE if now.sampled else "no sampled step yet"
        yield "note", "modules are not known" if now.sampled is None else none
        return
    shown = now.sites[:most]
    rows = [("nonfinite", "abs max", "growth", "rms"), *map(_numbers, shown)]
    numbers = [f"{line}  " for line in table(rows, right=(0, 1, 2, 3))]
    left = width - len(numbers[0]) - len(_GUILTY) * any(s.guilty for s in shown)
    names = shortened((plain(s.site) for s in shown), max(left, _LEAST_NAME))
    yield "head", f"{numbers[0]}worst modules"
    for site, line, name in zip(shown, numbers[1:], names, strict=True):
        bad = site.guilty or site.nonfinite
        yield "bad" if bad else "", f"{line}{name}{_GUILTY if site.guilty else ''}"


def _numbers(s: SiteNow) -> tuple[str, ...]:
    growth = UNOBSERVED if s.growth is None else f"x{s.growth:.3g}"
    peak, rms = (None if math.isnan(x) else x for x in (s.abs_max, s.rms))  # nothing was finite
    return (_known(s.nonfinite), _number(peak), growth, _number(rms))


def _anomalies(now: LiveView, most: int) -> Iterator[Line]:
    texts = now.anomalies
    if not texts:
        yield "head", "anomalies are not known" if now.sampled is None else "no anomalies"
        return
    more = f", {len(texts) - most} more: ddpprobe anomalies" if len(texts) > most else ""
    yield "head", f"anomalies ({len(texts)}{more})"
    for text in texts[:most]:
        yield "bad" if text.startswith("PAGE") else "odd", text


def _known(value: object) -> str:
    return UNOBSERVED if value is None else str(value)


def _number(value: float | None) -> str:
    """Format a reading in 4 digits; here NaN is what was read."""
    if value is None:
        return UNOBSERVED
    if not math.isfinite(value):
        return str(value)
    return number(float(f"{value:.4g}"))
