"""Which modules to capture in full: the guilty one, or, where none is named, who stands nearest."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ddpprobe.records.step import NONFINITE, Anomaly, StepRecord, derive

MAX_SUSPECTS = 4  # modules that one page puts under suspicion
MAX_MODULES = 256  # in one order, and
MAX_NAME_BYTES = 32 << 10  # of all their names
_OF_MODULES = ("input", "output", "grad_output", "grad_input")


def suspects(
    anomaly: Anomaly | None, near: Iterable[Anomaly], merged: StepRecord | None
) -> list[str]:
    """Return at most `MAX_SUSPECTS` FQNs, the likeliest first.

    The module that the anomaly names (the owner, where it names a parameter); else those that other
    anomalies near it name; else, of the newest sampled step, those with non-finite elements, in
    execution order; else those with the largest magnitudes. Of a module and its children, both in
    question, the children are taken: what they did wrong is all the parent has to show.

    Args:
        anomaly: the verdict; None if a user asked.
        near: other anomalies of the attempt, newest last.
        merged: the newest merged record of a sampled step.
    """
    if anomaly is not None and anomaly.module is not None:
        return [_owner(anomaly)]
    named = [_owner(other) for other in near if other.module is not None]
    if named:
        return list(dict.fromkeys(reversed(named)))[:MAX_SUSPECTS]
    return _of_record(merged) if merged is not None else []


def match(globs: Sequence[str], merged: StepRecord | None) -> list[str]:
    """Return the observed modules that match any of the globs, in execution order."""
    names = dict.fromkeys(s.fqn for s in merged.sites if s.kind in _OF_MODULES) if merged else {}
    return [n for n in names if any(fnmatch.fnmatchcase(n, glob) for glob in globs)]


def bounded(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first of the names, without repetition, as many as one order takes."""
    taken: list[str] = []
    left = MAX_NAME_BYTES
    for name in dict.fromkeys(names):
        left -= len(name.encode(errors="backslashreplace"))
        if left < 0 or len(taken) == MAX_MODULES:
            break
        taken.append(name)
    return tuple(taken)


def _owner(anomaly: Anomaly) -> str:
    """Return the module of an anomaly that names one, or a parameter."""
    fqn = anomaly.module or ""
    return fqn if anomaly.kind in (*_OF_MODULES, None) else fqn.rpartition(".")[0]


def _of_record(record: StepRecord) -> list[str]:
    rows = [i for i, site in enumerate(record.sites) if site.kind in _OF_MODULES]
    bad = [i for i in rows if record.counts[i, NONFINITE].any()]
    if not bad:
        largest = derive("abs_max", record.counts, record.values)
        bad = sorted((i for i in rows if not np.isnan(largest[i])), key=lambda i: -largest[i])
    names = dict.fromkeys(record.sites[i].fqn for i in bad)
    parents = {parent for name in names for parent in _parents(name)}
    return [name for name in names if name not in parents][:MAX_SUSPECTS]


def _parents(name: str) -> Iterator[str]:
    """Yield the modules that hold a module, the root ("") among them."""
    if name:
        yield ""
    yield from (name[:at] for at, letter in enumerate(name) if letter == ".")
