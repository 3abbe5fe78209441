"""The settings of a detector: the keyword arguments of its constructor, which are all numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

Number = int | float
Settings = Mapping[str, Mapping[str, Number]]  # detector -> setting -> value

MOST = 1 << 20  # of anything counted: windows this long still fit into memory


def at_least(low: Number, **settings: Number) -> None:
    """Refuse settings below `low`, infinite ones, and more than `MOST` of anything.

    Raises:
        ValueError: names the setting, what came and what was expected.
    """
    for name, value in settings.items():
        if not low <= value <= MOST:
            raise ValueError(f"{name}={value}: expected a number from {low} to {MOST}")


def above_zero(**settings: Number) -> None:
    """Refuse settings that are not positive and finite.

    Raises:
        ValueError: as `at_least`.
    """
    for name, value in settings.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: expected a number above 0")


def defaults(detector: type[Any]) -> dict[str, Number]:
    """Return the settings that a detector has, with their defaults, in the order it names them."""
    parameters = inspect.signature(detector).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def parse(detector: type[Any], given: Mapping[str, str]) -> dict[str, Number]:
    """Read settings as they are typed: a whole number where the default is one.

    Raises:
        ValueError: the detector has no such setting, or the value is no such number; the text
            lists what there is.
    """
    known = defaults(detector)
    found: dict[str, Number] = {}
    for name, text in given.items():
        if name not in known:
            there = ", ".join(f"{key}={value}" for key, value in known.items())
            raise ValueError(f"{detector.name} has no setting {name!r}; it has {there}")
        kind = type(known[name])
        try:
            found[name] = kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name}={text}: expected {wanted}, such as {known[name]}") from None
    detector(**found)  # it knows what each may be
    return found
