"""A run as a small table, a row for each site and each scalar: what many runs are compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import Anomaly, Counts, Floats, Site, Values, observed

SCALAR = "scalar"  # the kind of a row that is a scalar; its name is the fqn
# Of the run, the same in every row. Types: "int", "text", "time" (Unix ns).
FACTS = {
    "run_id": "text", "name": "text", "began": "time", "state": "text", "attempt": "int",
    "ranks": "int", "nodes": "int", "wrapper": "text", "torch": "text", "hostname": "text",
    "config": "text", "first_step": "int", "last_step": "int", "sampled_steps": "int",
    "pages": "int", "warnings": "int", "cause_detector": "text", "cause_step": "int",
    "cause_rank": "int", "cause_module": "text", "cause_kind": "text", "cause_message": "text",
}  # fmt: skip
# Of a site its rms, of a scalar the mean over the ranks, over the steps. `first` and `last` are as
# they were, NaN too: what ended in NaN must not look like its last good step. `steps`, `min`, `max`
# and `mean` are over what is finite (of a scalar: over the ranks that gave a finite one).
NUMBERS = {
    "steps": "int", "first": "float", "last": "float", "min": "float", "max": "float",
    "mean": "float", "nonfinite": "int", "abs_max": "float", "zero_ratio": "float",
}  # fmt: skip
TYPES = {
    **FACTS, "kind": "text", "fqn": "text", "leaf": "text", "placement": "text", "dtype": "text",
    **NUMBERS,
}  # fmt: skip


@final
class Overview:
    """Takes in the records of a run, in the order of its steps, in memory of one row a label."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, str, str], int] = {}
        self._labels: list[Site] = []
        self._rms, self._scalars = _Track(), _Track()
        self._abs_max, self._zero_ratio = _Track(), _Track()
        self._bad = np.zeros(0, np.int64)
        self._bad_scalars = np.zeros(0, np.int64)
        self._names: dict[str, int] = {}
        self._steps: list[int] = []
        self._sampled = 0

    def add_steps(self, steps: NDArray[np.int64], sampled: NDArray[np.bool_]) -> None:
        """Take in which steps [rows] there are, and which were sampled and came to their end."""
        if len(steps):
            self._steps = [min([*self._steps, int(steps.min())]),
                           max([*self._steps, int(steps.max())])]  # fmt: skip
            self._sampled += int(sampled.sum())

    def add_sites(self, sites: Sequence[Site], counts: Counts, values: Values) -> None:
        """Take in rows of sampled steps: counts and values [rows, sites, columns]."""
        for site in sites:
            if site.key not in self._sites:
                self._sites[site.key] = len(self._labels)
                self._labels.append(site)
        at = np.array([self._sites[site.key] for site in sites], np.intp)
        bad = observed("nonfinite", counts, values)
        is_bad: NDArray[np.bool_] = np.greater(bad, 0)
        tracks = {"rms": self._rms, "abs_max": self._abs_max, "zero_ratio": self._zero_ratio}
        for stat, track in tracks.items():
            found = observed(stat, counts, values)
            track.add(at, found, found, is_bad)
        self._bad = _grown(self._bad, len(self._labels), 0)
        np.add.at(self._bad, at, np.nan_to_num(bad).sum(axis=0).astype(np.int64))

    def add_scalars(self, names: Sequence[str], values: Floats, given: NDArray[np.bool_]) -> None:
        """Take in scalars [rows, ranks, names], and where they were given.

        Those of steps before their record (`loss@-1`) are left out.
        """
        chosen = [i for i, name in enumerate(names) if "@" not in name]
        for i in chosen:
            self._names.setdefault(names[i], len(self._names))
        at = np.array([self._names[names[i]] for i in chosen], np.intp)
        values, given = values[..., chosen], given[..., chosen]
        known = given & np.isfinite(values)
        finite, all_ = _means(values, known), _means(values, given)
        bad = given & ~known
        self._scalars.add(at, finite, all_, np.logical_or.reduce(bad, axis=1))
        self._bad_scalars = _grown(self._bad_scalars, len(self._names), 0)
        np.add.at(self._bad_scalars, at, bad.sum(axis=(0, 1)))

    def rows(self, facts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the table: a list for each of `TYPES`, None where something is not known.

        Args:
            facts: those of `FACTS` that the records do not say.
        """
        n, labels = len(self._labels), list(self._names)
        kinds = [*(site.kind for site in self._labels), *[SCALAR] * len(labels)]
        sites: dict[str, list[Any]] = {
            "fqn": [*(site.fqn for site in self._labels), *labels],
            **{
                name: [*(getattr(site, name) for site in self._labels), *[None] * len(labels)]
                for name in ("leaf", "placement", "dtype")
            },
        }
        largest, zeros = self._abs_max.numbers(n), self._zero_ratio.numbers(n)
        parts = [self._rms.numbers(n), self._scalars.numbers(len(labels))]
        told = {
            **facts,
            "first_step": min(self._steps, default=None),
            "last_step": max(self._steps, default=None),
            "sampled_steps": self._sampled,
        }
        found: dict[str, list[Any]] = {
            **{name: [told.get(name)] * (n + len(labels)) for name in FACTS},
            "kind": kinds,
            **sites,
            **{name: [*parts[0][name], *parts[1][name]] for name in parts[0]},
            "nonfinite": [*self._bad.tolist(), *self._bad_scalars.tolist()],
            "abs_max": [*largest["max"], *[None] * len(labels)],
            "zero_ratio": [*zeros["mean"], *[None] * len(labels)],
        }
        return {name: found[name] for name in TYPES}


class _Track:
    """First, last, smallest, largest and mean of columns over rows that come one by one."""

    def __init__(self) -> None:
        self._count = np.zeros(0, np.int64)
        self._met = np.zeros(0, np.bool_)
        self._of = {name: np.zeros(0) for name in ("first", "last", "min", "max", "total")}

    def add(
        self, at: NDArray[np.intp], values: Floats, as_it_was: Floats, bad: NDArray[np.bool_]
    ) -> None:
        """Take in rows of the columns `at`.

        Args:
            at: the columns.
            values: [rows, columns] of what is finite; NaN where there is none.
            as_it_was: the same with what is not finite.
            bad: where something was not finite, so that NaN is a value there.
        """
        size = max(len(self._count), int(at.max(initial=-1)) + 1)
        self._count, self._met = _grown(self._count, size, 0), _grown(self._met, size, 0)
        self._of = {name: _grown(held, size, np.nan) for name, held in self._of.items()}
        known = ~np.isnan(values)
        met = known | bad
        some = met.any(axis=0)
        values, known, met, at = values[:, some], known[:, some], met[:, some], at[some]
        told = as_it_was[:, some]
        columns, of = np.arange(len(at)), self._of
        new = ~self._met[at]
        of["first"][at[new]] = told[met.argmax(axis=0), columns][new]
        of["last"][at] = told[len(told) - 1 - met[::-1].argmax(axis=0), columns]
        self._met[at] = True
        of["total"][at[new]] = 0.0
        np.fmin.at(of["min"], at, np.fmin.reduce(values, axis=0))
        np.fmax.at(of["max"], at, np.fmax.reduce(values, axis=0))
        np.add.at(of["total"], at, np.where(known, values, 0.0).sum(axis=0))
        np.add.at(self._count, at, known.sum(axis=0))

    def numbers(self, size: int) -> dict[str, list[Any]]:
        """Return steps, first, last, min, max and mean of `size` columns; None: not known.

        A first or a last that is NaN was NaN, or infinite both ways.
        """
        count, met = _grown(self._count, size, 0), _grown(self._met, size, 0)
        held = {name: _grown(values, size, np.nan) for name, values in self._of.items()}
        total = held.pop("total")
        with np.errstate(invalid="ignore", divide="ignore"):
            held["mean"] = np.where(count > 0, total / count, np.nan)
        numbers: dict[str, list[Any]] = {"steps": count.tolist()}
        for name, values in held.items():
            there = met if name in {"first", "last"} else ~np.isnan(values)
            pairs = zip(values.tolist(), there.tolist(), strict=True)
            numbers[name] = [x if here else None for x, here in pairs]
        return numbers


def facts_of(
    identity: Mapping[str, Any], config: Mapping[str, str], *, state: str, attempt: int,
    found: Sequence[Anomaly],
) -> dict[str, Any]:  # fmt: skip
    """Return what a table says of its run.

    Args:
        identity: content of run.json.
        config: what the script said by `probe.note(config=...)`.
        state: how its newest attempt ended, one of `ends.end.STATES`.
        attempt: number of that.
        found: its anomalies, in order of cause.
    """
    bad = [a for a in found if a.level != "info"]
    pages = [a for a in bad if a.level == "page"]
    cause = next(iter(pages or bad), None)
    return {
        "run_id": _text(identity.get("run_id")),
        "name": _text(identity.get("name")),
        "began": _number(identity.get("created_ns")),
        "state": state,
        "attempt": attempt,
        "ranks": _number(identity.get("world_size")),
        "nodes": _number(identity.get("nodes")),
        "wrapper": _text(identity.get("wrapper")),
        "torch": _text(identity.get("torch")),
        "hostname": _text(identity.get("hostname")),
        "config": json.dumps(dict(config)) if config else None,
        "pages": len(pages),
        "warnings": len(bad) - len(pages),
        "cause_detector": cause and cause.detector,
        "cause_step": cause and cause.step,
        "cause_rank": cause and cause.rank,
        "cause_module": cause and cause.module,
        "cause_kind": cause and cause.kind,
        "cause_message": cause and cause.message,
    }


def _means(values: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Return means over the ranks [rows, names] of those chosen [rows, ranks, names]."""
    many = chosen.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = np.where(chosen, values, 0.0).sum(axis=1) / many
    return np.where(many > 0, means, np.nan)


def _grown(held: NDArray[Any], size: int, fill: float) -> NDArray[Any]:
    return np.concatenate([held, np.full(max(size - len(held), 0), fill, held.dtype)])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if type(value) is int and abs(value) < 2**63 else None
