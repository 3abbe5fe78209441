"""What was kept in full or done at some steps of an attempt, on whose word, and by how many ranks.

The head's daemon and the ranks say it in their journals, so that no pack and no tensor is opened.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ddpprobe.packs import FIRST_BAD
from ddpprobe.replay.rank_facts import Event

# How the cause of an order begins, and who was behind it.
_ASKED = {"trigger/": "script", "request/": "user"}
_PAGE = "page"
_HEARD, _LATE = "order", "late_order"
_INSTALLED = "capture"  # the reason of what `install(capture=...)` named
_OWN = {_INSTALLED: "install", FIRST_BAD: "first bad module"}


def orders_of(events: list[Event]) -> list[dict[str, Any]]:
    """Return the head's orders, and then what ranks kept without one, as plain values.

    Keys: `action` (capture, stop or tell), `first` and `last` step, `by` ("page", "script":
    `probe.trigger`, "user": `ddpprobe trigger`; without an order "install": `install(capture=...)`,
    "first bad module"), `reason`, `modules` (their number; 0: all of them, None: not said), `heard`
    and `late` (ranks that heard of it in time, and too late; None without an order), and for
    captures `ranks` that kept something, at how many `steps`, and its `bytes` on their disks.
    """
    kept, heard = _kept(events), _heard(events)
    found = [
        _order(what, heard, kept)
        for e in events
        if (what := e.what).get("event") == "order" and isinstance(what.get("cause"), str)
    ]
    ordered = {step for o in found if o["action"] == "capture"
               for step in kept if o["first"] <= step <= o["last"]}  # fmt: skip
    found.sort(key=lambda order: (order["first"], order["last"]))
    for reason, by in _OWN.items():
        mine = {
            step: here
            for step, packs in kept.items()
            if step not in ordered and (here := {r: p for r, p in packs.items() if p[1] == reason})
        }
        if mine:
            facts = {"action": "capture", "first": min(mine), "last": max(mine), "by": by}
            unsaid = {"reason": reason, "modules": None, "heard": None, "late": None}
            found.append({**facts, **unsaid, **_totals(mine)})
    return found


_Packs = dict[int, dict[int, tuple[int, str]]]  # step -> rank -> bytes and reason
_Ranks = dict[tuple[str, int], set[int]]  # how it was heard, number of the order -> ranks


def _kept(events: list[Event]) -> _Packs:
    found: _Packs = defaultdict(dict)
    for event in events:
        step, rank, what = event.what.get("step"), event.rank, event.what
        if what.get("event") == "captured" and isinstance(step, int) and rank is not None:
            found[step][rank] = _whole(what.get("bytes")), str(what.get("reason", ""))
    return found


def _heard(events: list[Event]) -> _Ranks:
    found: _Ranks = defaultdict(set)
    for event in events:
        rank, how, number = event.rank, event.what.get("event"), event.what.get("number")
        if how in (_HEARD, _LATE) and rank is not None and isinstance(number, int):
            found[str(how), number].add(rank)
    return found


def _order(what: dict[str, Any], heard: _Ranks, kept: _Packs) -> dict[str, Any]:
    cause, modules, number = str(what["cause"]), what.get("modules"), what.get("number")
    number = number if isinstance(number, int) else -1
    first = _whole(what.get("start"))
    last = max(first, _whole(what.get("stop")) - 1)
    found = {
        "action": str(what.get("action", "")), "first": first, "last": last,
        "by": next((by for begin, by in _ASKED.items() if cause.startswith(begin)), _PAGE),
        "reason": str(what.get("reason", "")),
        "modules": len(modules) if isinstance(modules, list) else None,
        "heard": sorted(heard[_HEARD, number]), "late": sorted(heard[_LATE, number]),
    }  # fmt: skip
    if found["action"] == "capture":
        found |= _totals({step: p for step, p in kept.items() if first <= step <= last})
    return found


def _totals(packs: _Packs) -> dict[str, Any]:
    return {
        "ranks": sorted({rank for here in packs.values() for rank in here}),
        "steps": len(packs),
        "bytes": sum(size for here in packs.values() for size, _ in here.values()),
    }


def _whole(said: object) -> int:
    """Return a count of a journal, 0 where it is none."""
    return said if isinstance(said, int) and 0 <= said < 2**63 else 0
