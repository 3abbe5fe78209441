"""What a stranger's JSON says, as what it must be: of its type, and within its bounds.

Frames are checksummed, which tells of accidents, not of malice. What is wrong raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from ddpprobe.records import events
from ddpprobe.records.events import MESSAGES, Event, Message
from ddpprobe.records.fate import Rank
from ddpprobe.records.step import KINDS, LEVELS, PHASES, SEVERAL, Anomaly, FirstBad

MAX_RANKS = 1 << 24  # a rank beyond is nonsense, for which no bit mask is allocated
# What taking a value apart raises if it is not what it should be, besides ValueError. An infinity
# or 10**400 where a number is needed is an ArithmeticError.
WRONG = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error)
MALFORMED = (ValueError, *WRONG)
_BAD = ("nan", "pos_inf", "neg_inf", "numel")


def anomaly(value: Any) -> Anomaly:  # noqa: ANN401  (what JSON made of it)
    """Return an anomaly from its fields, each of which is what it must be.

    Raises:
        ValueError: it is none.
    """
    try:
        whose, module, kind = value["rank"], value["module"], value["kind"]
        if value["level"] not in LEVELS:
            raise ValueError(f"no level {value['level']!r}")
        return Anomaly(
            detector=str(value["detector"]),
            level=str(value["level"]),
            step=int64(value["step"]),
            micro=int64(value["micro"]),
            rank=None if whose is None else rank(whose),
            module=None if module is None else str(module),
            kind=None if kind is None else str(kind),
            phase=str(value["phase"]),
            first_cause=bool(value["first_cause"]),
            message=str(value["message"]),
            values=numbers(value["values"]),
            sampled=bool(value["sampled"]),
            attempt=int64(value["attempt"]),
            wall_time_ns=int64(value["wall_time_ns"]),
        )
    except WRONG as error:
        raise ValueError(f"not an anomaly: {type(error).__name__}: {error}") from error


def first_bad(said: Mapping[str, Any]) -> FirstBad:
    """Return what a record says was non-finite first; a stranger's words are not taken as given."""
    bad = FirstBad(**said)
    counts = (getattr(bad, name) for name in ("step", "micro", "order", *_BAD))
    texts = (bad.fqn, bad.kind)
    if (
        any(int64(n) != n for n in counts)
        or bad.phase not in PHASES
        or bad.kind not in {None, *KINDS}
        or not isinstance(bad.leaf, str)
        or not all(isinstance(text, str | None) for text in texts)
    ):
        raise ValueError("a first non-finite tensor that makes no sense")
    return bad if bad.rank == SEVERAL else replace(bad, rank=rank(bad.rank))


def numbers(said: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers by name, whole ones as they are; each fits into a float."""
    for name, value in said.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{name!r} is no number")  # noqa: TRY004  (bad data)
        float(value)  # OverflowError
    return {str(name): value for name, value in said.items()}


def int64(value: Any) -> int:  # noqa: ANN401  (what JSON made of it)
    """Return a whole number that an array can hold.

    Raises:
        ValueError: it is none, be it an infinity.
        TypeError: it is no number at all.
    """
    try:
        number = int(value)
    except OverflowError as error:
        raise ValueError(f"{value} is no whole number") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{value} does not fit into 64 bits")
    return number


def count(said: Any, otherwise: int) -> int:  # noqa: ANN401  (a number of a record)
    """Return a number as a whole one; `otherwise` if it is none, such as NaN or an infinity."""
    try:
        return int64(said)
    except MALFORMED:
        return otherwise


def rank(value: Any) -> int:  # noqa: ANN401  (what JSON made of it)
    """Return a rank."""
    if type(value) is not int or not 0 <= value < MAX_RANKS:
        raise ValueError(f"rank {value!r}: there are no more than {MAX_RANKS}")
    return value


def event(said: Mapping[str, Any]) -> Event | None:
    """Return an event of a journal; None if it is of a kind that only a newer version knows.

    Raises:
        ValueError: a field of it makes no sense, or one that is needed is missing.
    """
    return cast("Event | None", _of_kind(said, events.KINDS))


def known_event(said: Mapping[str, Any]) -> Event | None:
    """Return an event of a journal; None if it makes no sense: only `verify` says so."""
    try:
        return event(said)
    except ValueError:
        return None


def message(said: Mapping[str, Any]) -> Message:
    """Return what another node's daemon says.

    Raises:
        ValueError: no node says that.
    """
    found = _of_kind(said, MESSAGES)
    if found is None:
        raise ValueError(f"no node says {said['event']!r:.100}")
    return cast("Message", found)


def _of_kind(said: Mapping[str, Any], kinds: Mapping[str, type]) -> object | None:
    name = said.get("event")
    if not isinstance(name, str):
        raise ValueError(f"no event is called {name!r:.40}")  # noqa: TRY004  (bad data)
    return _object(kinds[name], said, name) if name in kinds else None


def _object(kind: type, values: Mapping[str, Any], name: str) -> object:
    """Return a dataclass from its fields; one that it does not know is a newer version's."""
    given = {}
    for key, (read, needed) in _readers(kind).items():
        if needed or key in values:
            try:
                given[key] = read(values.get(key))
            except MALFORMED:
                raise ValueError(f"{key!r} of {name!r} is {values.get(key)!r:.40}") from None
    return kind(**given)


Read = Callable[[Any], Any]


@cache
def _readers(kind: type) -> Mapping[str, tuple[Read, bool]]:
    """Return how each field of a dataclass is read, and whether it must be there."""
    types = get_type_hints(kind, include_extras=True)
    return {
        f.name: (_reader(types[f.name]), f.default is f.default_factory is MISSING)
        for f in fields(kind)
    }


def _reader(type_: Any) -> Read:  # noqa: ANN401  (an annotation)
    if type_ in _PLAIN:
        return _PLAIN[type_]
    if is_dataclass(type_) and isinstance(type_, type):
        return lambda said: _object(type_, _plain(dict)(said), type_.__name__)
    one, *others = get_args(type_)
    read = _reader(one)
    match get_origin(type_):
        case origin if origin is UnionType:  # with None
            return lambda said: None if said is None else read(said)
        case origin if origin is tuple:
            return lambda said: tuple(map(read, _plain(list)(said)))
    value, key = _reader(others[0]), _rank_of_text if one == Rank else read
    return lambda said: {key(k): value(v) for k, v in said.items()}


def _plain(type_: type) -> Read:
    """Return what takes values of a type as JSON has it: True is no number."""

    def read(said: Any) -> Any:  # noqa: ANN401  (what JSON made of it)
        if type(said) is not type_:
            raise TypeError(f"{said!r:.40} is no {type_.__name__}")
        return said

    return read


def _whole(value: Any) -> int:  # noqa: ANN401  (what JSON made of it)
    if type(value) is not int or not -1 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is no number of a step, a time or a thing")
    return value


def _number(value: Any) -> float:  # noqa: ANN401  (what JSON made of it)
    if type(value) not in {int, float}:
        raise TypeError(f"{value!r:.40} is no number")
    return float(value)


def _rank_of_text(said: str) -> int:
    return rank(int(said))


_PLAIN: Mapping[Any, Read] = {
    int: _whole, float: _number, Rank: rank, str: _plain(str), bool: _plain(bool),
}  # fmt: skip
