"""What a stranger's JSON says, as what it must be: of its type, and within its bounds.

Frames are checksummed, which tells of accidents, not of malice. What is wrong raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ddpprobe.records import KINDS, PHASES, SEVERAL, Anomaly, FirstBad

MAX_RANKS = 1 << 24  # a rank beyond is nonsense, for which no bit mask is allocated
LEVELS = ("page", "warn", "info")
# What taking a value apart raises if it is not what it should be, besides ValueError. An infinity
# or 10**400 where a number is needed is an ArithmeticError.
WRONG = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error)
MALFORMED = (ValueError, *WRONG)
_BAD = ("nan", "pos_inf", "neg_inf", "numel")


def anomaly(said: Any) -> Anomaly:  # noqa: ANN401  (what JSON made of it)
    """Return an anomaly from its fields, each of which is what it must be.

    Raises:
        ValueError: it is none.
    """
    try:
        whose, module, kind = said["rank"], said["module"], said["kind"]
        if said["level"] not in LEVELS:
            raise ValueError(f"no level {said['level']!r}")
        return Anomaly(
            detector=str(said["detector"]),
            level=str(said["level"]),
            step=int64(said["step"]),
            micro=int64(said["micro"]),
            rank=None if whose is None else rank(whose),
            module=None if module is None else str(module),
            kind=None if kind is None else str(kind),
            phase=str(said["phase"]),
            first_cause=bool(said["first_cause"]),
            message=str(said["message"]),
            values=numbers(said["values"]),
            sampled=bool(said["sampled"]),
            attempt=int64(said["attempt"]),
            wall_time_ns=int64(said["wall_time_ns"]),
        )
    except WRONG as error:
        raise ValueError(f"not an anomaly: {type(error).__name__}: {error}") from error


def first_bad(said: Mapping[str, Any]) -> FirstBad:
    """Return what a record says was non-finite first; a stranger's words are not taken as given."""
    found = FirstBad(**said)
    counts = (getattr(found, name) for name in ("step", "micro", "order", *_BAD))
    texts = (found.fqn, found.kind)
    if (
        any(int64(n) != n for n in counts)
        or found.phase not in PHASES
        or found.kind not in {None, *KINDS}
        or not isinstance(found.leaf, str)
        or not all(isinstance(text, str | None) for text in texts)
    ):
        raise ValueError("a first non-finite tensor that makes no sense")
    return found if found.rank == SEVERAL else replace(found, rank=rank(found.rank))


def numbers(said: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers by name, whole ones as they are; each fits into a float."""
    for name, value in said.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{name!r} is no number")  # noqa: TRY004  (bad data)
        float(value)  # OverflowError
    return {str(name): value for name, value in said.items()}


def int64(said: Any) -> int:  # noqa: ANN401  (what JSON made of it)
    """Return a whole number that an array can hold.

    Raises:
        ValueError: it is none, be it an infinity.
        TypeError: it is no number at all.
    """
    try:
        number = int(said)
    except OverflowError as error:
        raise ValueError(f"{said} is no whole number") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{said} does not fit into 64 bits")
    return number


def count(said: Any, otherwise: int) -> int:  # noqa: ANN401  (a number of a record)
    """Return a number as a whole one; `otherwise` if it is none, such as NaN or an infinity."""
    try:
        return int64(said)
    except MALFORMED:
        return otherwise


def rank(said: Any) -> int:  # noqa: ANN401  (what JSON made of it)
    """Return a rank."""
    if not isinstance(said, int) or not 0 <= said < MAX_RANKS:
        raise ValueError(f"rank {said!r}: there are no more than {MAX_RANKS}")
    return said


def fault_of_life(event: Mapping[str, Any]) -> str:
    """Say what in an event no writer of ours would say; "" if every reader can take it.

    Only what is there is looked at, besides what no reader can do without. An event, or a field,
    that is not known is a newer version's.
    """
    name = event.get("event")
    fields = _FIELDS.get(name, {}) if isinstance(name, str) else {}
    if not isinstance(name, str):
        return f"no event is called {name!r:.40}"
    for field, read in fields.items():
        if field not in event and field not in _NEEDED.get(name, ()):
            continue
        try:
            read(event.get(field))
        except MALFORMED:
            return f"{field!r} of {name!r} is {event.get(field)!r:.40}"
    return ""


def _text(said: Any) -> str:  # noqa: ANN401  (what JSON made of it)
    if not isinstance(said, str):
        raise TypeError(f"{said!r:.40} is no text")
    return said


def _flag(said: Any) -> bool:  # noqa: ANN401  (what JSON made of it)
    if not isinstance(said, bool):
        raise TypeError(f"{said!r:.40} is neither true nor false")
    return said


def _whole(said: Any) -> int:  # noqa: ANN401  (what JSON made of it)
    if not isinstance(said, int):
        raise TypeError(f"{said!r:.40} is no whole number")
    return int64(said)


def _texts(said: Any) -> list[str]:  # noqa: ANN401  (what JSON made of it)
    if not isinstance(said, list):
        raise TypeError(f"{said!r:.40} is no list")
    return [_text(one) for one in said]


def _counts(said: Any) -> dict[str, int]:  # noqa: ANN401  (what JSON made of it)
    return {str(name): _whole(value) for name, value in said.items()}


def _error(said: Any) -> None:  # noqa: ANN401  (what JSON made of it)
    for name in ("type", "message", "where"):
        _text(said.get(name, ""))
    for name in ("collective", "asked"):
        _flag(said.get(name, False))


def _ranks(said: Any) -> list[int]:  # noqa: ANN401  (what JSON made of it)
    if not isinstance(said, list):
        raise TypeError(f"{said!r:.40} is no list")
    return [rank(one) for one in said]


def _if_any(read: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return what reads a value that may be null."""
    return lambda said: None if said is None else read(said)


def _beats(said: Any) -> None:  # noqa: ANN401  (what JSON made of it)
    for number, beat in said.items():
        rank(int(number))
        for name in {"step", "sampled", "state", *beat} & _BEAT.keys():
            _BEAT[name](beat[name])


_ORDER: dict[str, Callable[[Any], object]] = {
    "number": _whole, "action": _text, "start": _whole, "stop": _whole, "cause": _text,
    "reason": _text, "modules": _texts,
}  # fmt: skip
# How far a rank had come, as `ends.evidence.beat_facts` says it.
_PLACE = {"step": _whole, "steps": _whole, "micro": _whole, "state": _text}
_BEAT = {**_PLACE, "sampled": _whole}
_LOOKED_AT = {"rank": rank, "time_ns": _whole}
# What a journal says happened, and how each field of it is read.
_FIELDS: Mapping[str, Mapping[str, Callable[[Any], object]]] = {
    "blind": {"step": _whole, "modules": _texts, "count": _whole},
    "budget": {"step": _whole, "every": _whole},
    "captured": {"step": _whole, "bytes": _whole, "reason": _text},
    "closed": {
        "status": _text, "sampled": _whole, "error": _error, "handles": _flag,
        "at_exit": _flag, "asked": _flag, **_PLACE,
    },
    "continued": _LOOKED_AT,
    "death": {
        "rank": rank, "signal": _text, "time_ns": _whole, "step": _whole, "first": _flag,
    },
    "dropped": {"reason": _text, "count": _whole},
    "end": {
        "state": _text, "ranks": _ranks, "how": _text, "step": _if_any(_whole),
        "phase": _if_any(_text), "message": _text,
    },
    "exit": {
        "rank": rank, "how": _text, "order": _whole, "witness": _text, "time_ns": _whole, **_PLACE,
    },
    "fuse": {"component": _text, "error": _text},
    "job": {"scheduler": _text},
    "last_beats": {"ranks": _beats},
    "late_order": _ORDER,
    "moving": {"time_ns": _whole},
    "order": _ORDER,
    "order_dropped": {"cause": _text, "reason": _text},
    "paused": {"reason": _text, "time_ns": _whole},
    "pinned": {"first": _whole, "last": _whole, "cause": _text, "reason": _text},
    "pushed": {"step": _whole},
    "resumed": {"time_ns": _whole},
    "sites": {
        "expected": _whole, "observed": _whole, "step": _whole, "unsupported": _counts,
        "silent": _texts,
    },
    "stalled": {"time_ns": _whole},
    "steady": {"step": _whole, "fqn": _text, "kind": _text, "leaf": _text, "values": _texts},
    "suspended": _LOOKED_AT,
    "topology": {"wrapper": _text, "device": _text},
    "trigger": {"number": _whole, "step": _whole, "reason": _text},
    "unsampled": {"step": _whole, "reason": _text},
}  # fmt: skip
_NEEDED = {
    "continued": ("rank", "time_ns"), "death": ("rank",), "dropped": ("reason", "count"),
    "exit": ("rank", "how", "order", "witness", "time_ns"), "fuse": ("component",),
    "job": ("scheduler",), "last_beats": ("ranks",), "moving": ("time_ns",), "pushed": ("step",),
    "sites": ("expected", "observed"), "stalled": ("time_ns",), "steady": ("values",),
    "suspended": ("rank", "time_ns"), "trigger": ("number", "step", "reason"),
}  # fmt: skip
