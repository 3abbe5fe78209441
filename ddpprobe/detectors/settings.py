"""The settings of a detector: the keyword arguments of its constructor, which are all numbers."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping

from ddpprobe.detectors.detector import Detector
from ddpprobe.records.near_names import by_nearness

Number = int | float
# detector -> setting -> value; None for a detector that is switched off
Settings = Mapping[str, Mapping[str, Number] | None]

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


def defaults(detector: type[Detector]) -> dict[str, Number]:
    """Return the settings that a detector has, with their defaults, in the order it names them."""
    parameters = inspect.signature(detector).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def summary(detector: type[Detector]) -> str:
    """Return what a detector finds: the first paragraph of its docstring, as one line."""
    text = inspect.cleandoc(detector.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()).rstrip(".")


def meanings(detector: type[Detector]) -> dict[str, str]:
    """Return what each setting means, as the `Args` of the docstring say."""
    said = inspect.cleandoc(detector.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    # An entry is "one, another: text", indented once; what goes on is indented twice.
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", said, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()).rstrip("."))
    return found


def parse(detector: type[Detector], given: Mapping[str, object]) -> dict[str, Number]:
    """Read settings as they are typed, or given as numbers: whole where the default is whole.

    Raises:
        ValueError: the detector has no such setting, or the value is no such number; the text
            lists what there is.
    """
    known = defaults(detector)
    found: dict[str, Number] = {}
    for name, value in given.items():
        if name not in known:
            there = ", ".join(f"{key}={known[key]}" for key in by_nearness(str(name), known))
            raise ValueError(f"{detector.name} has no setting {name!r}; it has {there}")
        kind = type(known[name])
        try:
            found[name] = kind(str(value))
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name}={value}: expected {wanted}, such as {known[name]}") from None
    detector(**found)  # it knows what each may be
    return found
