"""What was kept in full or done at some steps of an attempt, on whose word, and by how many ranks.

The head's daemon and the ranks say it in their journals, so that no pack and no tensor is opened.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ddpprobe.reader.rank_facts import Event
from ddpprobe.records.events import CapturedEvent, LateOrderEvent, OrderEvent
from ddpprobe.rundir.tensor_pack import FIRST_BAD

# How the cause of an order begins, and who was behind it.
_ASKED = {"trigger/": "script", "request/": "user"}
_PAGE = "page"
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
        _order(what, what.cause, heard, kept)
        for what in (e.what for e in events)
        if isinstance(what, OrderEvent) and what.cause is not None
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
_Ranks = dict[tuple[type, int], set[int]]  # how it was heard, number of the order -> ranks


def _kept(events: list[Event]) -> _Packs:
    found: _Packs = defaultdict(dict)
    for event in events:
        what, rank = event.what, event.rank
        if isinstance(what, CapturedEvent) and rank is not None:
            found[what.step][rank] = what.bytes, what.reason
    return found


def _heard(events: list[Event]) -> _Ranks:
    found: _Ranks = defaultdict(set)
    for event in events:
        if isinstance(event.what, OrderEvent | LateOrderEvent) and event.rank is not None:
            found[type(event.what), event.what.number].add(event.rank)
    return found


def _order(what: OrderEvent, cause: str, heard: _Ranks, kept: _Packs) -> dict[str, Any]:
    first, last = what.start, max(what.start, what.stop - 1)
    order = {
        "action": what.action, "first": first, "last": last,
        "by": next((by for begin, by in _ASKED.items() if cause.startswith(begin)), _PAGE),
        "reason": what.reason or "",
        "modules": None if what.modules is None else len(what.modules),
        "heard": sorted(heard[OrderEvent, what.number]),
        "late": sorted(heard[LateOrderEvent, what.number]),
    }  # fmt: skip
    if order["action"] == "capture":
        order |= _totals({step: p for step, p in kept.items() if first <= step <= last})
    return order


def _totals(packs: _Packs) -> dict[str, Any]:
    return {
        "ranks": sorted({rank for here in packs.values() for rank in here}),
        "steps": len(packs),
        "bytes": sum(size for here in packs.values() for size, _ in here.values()),
    }
