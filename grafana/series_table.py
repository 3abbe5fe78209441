"""Which series find room below the cap, counted on expositions of models of two sizes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np

from ddpprobe.metrics.render import Exposition, priorities
from ddpprobe.metrics.table import METRICS, SERIES_LIMIT
from ddpprobe.records.node_view import NodeView
from ddpprobe.records.step import COUNTS, VALUES, Site, StepRecord
from grafana import sample

RANKS = 8
SIZES = (1500, 6000)  # sites
WORLDS = (64, 512, 1_024, 1_032, 10_000)  # ranks of a job
LEAVES = ("norm", "q", "k", "v", "up", "down")
_SITE_METRICS = {m.name for m in METRICS if m.stat}
_FIRST = ("ddpprobe_site_position", "ddpprobe_site_update_ratio")
_CLASSES = (
    "ranks, node, verdicts, outlier slots",
    "place in execution order (`site_position`)",
    "`site_update_ratio`",
    "sites: modules that hold others",
    "sites: gradients",
    "sites: all else",
)
_WITHOUT_CAP = 10**6
_LINE = re.compile(r'(\w+)(?:{(?:.*?fqn="(.*?)",kind="(.*?)")?.*})? .*')


def sites_of(n: int) -> tuple[Site, ...]:
    """Return the first n sites of a transformer, in its execution order."""
    blocks = [f"blocks.{i}" for i in range(n)]
    leaves = [f"{block}.{leaf}" for block in blocks for leaf in LEAVES]
    per_block = 2 * (1 + 2 * len(LEAVES))  # outputs and gradients; of the weights two gradients
    names = blocks[: n // per_block + 1]
    modules = [m for b in names for m in (*(f"{b}.{leaf}" for leaf in LEAVES), b)]
    weights = [f"{m}.weight" for m in leaves if m.rpartition(".")[0] in set(names)]
    found = [Site(m, "output") for m in modules]
    found += [Site(m, "grad_output") for m in reversed(modules)]
    found += [Site(w, kind) for kind in ("grad_local", "grad") for w in weights]
    return tuple(found[:n])


def view_of(sites: int, world: int = RANKS) -> NodeView:
    """Return what a head with `RANKS` ranks serves of a job of `world` ranks with so many sites."""
    *_, last = sample.views()
    table = sites_of(sites)
    counts = np.zeros((sites, len(COUNTS)), np.int64)
    counts[:, [COUNTS.index(name) for name in ("numel", "tapped", "observed")]] = 1
    merged = StepRecord(0, 1, tuple(range(RANKS)), 0, sites=table, counts=counts,
                        values=np.ones((sites, len(VALUES))))  # fmt: skip
    ranks = tuple(replace(last.ranks[0], rank=rank, local_rank=rank) for rank in range(RANKS))
    weights = {site.fqn: 1e-3 for site in table if site.kind == "grad"}
    return replace(
        last, world_size=world, ranks=ranks, merged=merged, update_ratios=weights, magnitudes={}
    )


def counted(view: NodeView, limit: int) -> list[int]:
    """Return how many series of each of `_CLASSES` an exposition has."""
    names = [(site.fqn, site.kind) for site in (view.merged.sites if view.merged else ())]
    matters = dict(zip(names, priorities(names), strict=True))
    found: Counter[int] = Counter()
    for line in Exposition(limit).render(view, False).decode().splitlines():
        match = _LINE.fullmatch(line)
        if match is None or line.startswith("#"):
            continue
        name, fqn, kind = match.groups()
        if name in _SITE_METRICS:
            found[3 + matters[fqn, kind]] += 1
        else:
            found[1 + _FIRST.index(name) if name in _FIRST else 0] += 1
    return [found[i] for i in range(len(_CLASSES))]


def node_series(world: int) -> int:
    """Return how many series a node with `RANKS` ranks has that is not the head."""
    first = view_of(1, world)
    view = replace(
        first, is_head=False, merged=None, outliers=(), first_cause=None, first_failure=None,
        update_ratios={}, anomalies={}, exemplars={}, node_blocks={}, nodes_expected=None,
    )  # fmt: skip
    lines = Exposition().render(view, False).decode().splitlines()
    return sum(not line.startswith("#") for line in lines)


def table_of_ranks() -> str:
    """Return the table of tier A: series of a node and of the nodes of a job, by its ranks."""
    lines = [
        f"| ranks, {RANKS} on a node | series of a node that is not the head | of all such nodes |",
        "|---|---|---|",
    ]
    for world in WORLDS:
        series = node_series(world)
        lines.append(f"| {world:,} | {series} | {series * (world // RANKS - 1):,} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """Return the table: what is served, of how many, by priority."""
    heads = [f"{sites:,} sites, {RANKS} ranks" for sites in SIZES]
    lines = ["| first to last | " + " | ".join(heads) + " |", "|---|" + "---|" * len(SIZES)]
    views = [view_of(sites) for sites in SIZES]
    columns = [(counted(v, SERIES_LIMIT), counted(v, _WITHOUT_CAP)) for v in views]
    for i, words in enumerate((*_CLASSES, "all")):
        at = slice(i, i + 1) if i < len(_CLASSES) else slice(None)
        cells = [f"{sum(some[at]):,} of {sum(every[at]):,}" for some, every in columns]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
