"""What a user may say to a daemon in the environment: read here, and checked before it starts.

A rank's `install()` checks it too, as nobody reads the log of a daemon that has not started.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddpprobe.rundir import switches

LISTEN, LINGER, HISTOGRAMS = "DDPPROBE_LISTEN", "DDPPROBE_LINGER", "DDPPROBE_HISTOGRAMS"
MAX_BYTES, MAX_AGE = "DDPPROBE_MAX_BYTES", "DDPPROBE_MAX_AGE"
WEB_CONFIG = "DDPPROBE_WEB_CONFIG"  # the path of a `web_config`
# Those that are read here and elsewhere (`options`, `paths`, `fuse`, `service`).
PREFIX = "DDPPROBE_"
KNOWN = (
    LISTEN, LINGER, HISTOGRAMS, MAX_BYTES, MAX_AGE, WEB_CONFIG,
    *(PREFIX + name for name in (
        "BUDGET", "DIR", "DISABLE", "EVERY", "RUN", "SD_DIR", "SERVICE", "STRICT", "TOKEN"
    )),
)  # fmt: skip
LIKE = 0.85  # of difflib: a letter or two
_BYTES = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
# Option of the command line, units, example.
_QUANTITIES: dict[str, tuple[str, Mapping[str, float], str]] = {
    MAX_BYTES: ("--max-bytes", _BYTES, "20GB"), MAX_AGE: ("--max-age", _SECONDS, "14d"),
}  # fmt: skip


def check() -> None:
    """Look at all of them.

    Raises:
        ValueError: one makes no sense; the text says what to write.
    """
    if listen := os.environ.get(LISTEN):
        address(LISTEN, listen)
    seconds(LINGER)
    is_set(HISTOGRAMS)
    for variable in _QUANTITIES:
        quantity(variable)
    if web := os.environ.get(WEB_CONFIG):
        _check_web(Path(web))


def misspelt() -> dict[str, str]:
    """Return the variables of the environment that nobody reads, and what each is nearly called."""
    strange = (name for name in os.environ if name.startswith(PREFIX) and name not in KNOWN)
    near = {name: difflib.get_close_matches(name, KNOWN, 1, LIKE) for name in strange}
    return {name: found[0] for name, found in near.items() if found}


def _check_web(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{WEB_CONFIG}={path}: no such file; give the path of a web config")
    # Only who has such a file needs what it takes to read one.
    from ddpprobe.daemon import web_config  # noqa: PLC0415

    try:
        web_config.read(path)
    except web_config.WebConfigError as error:
        raise ValueError(f"{WEB_CONFIG}: {error}") from error


def is_set(variable: str) -> bool:
    """Return whether a variable switches something on. Raises ValueError."""
    switches.check(variable)
    return switches.is_on(variable)


def seconds(variable: str) -> float | None:
    """Return a variable's seconds, None where it is not set. Raises ValueError."""
    said = os.environ.get(variable, "").strip()
    if not said:
        return None
    try:
        return as_seconds(said)
    except ValueError as error:
        advice = f"write {variable}=20"
        raise ValueError(f"{variable}={said!r} is no number of seconds: {advice}") from error


def as_seconds(text: str) -> float:
    """Return what a text says in seconds; ValueError says what to write if it is no time."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"expected seconds, 0 or more, as in 20; got {text!r}")
    return found


def quantity(variable: str, given: str | None = None) -> float | None:
    """Return a number with a unit, `MAX_BYTES` in bytes or `MAX_AGE` in seconds; None without one.

    Args:
        variable: one of these two.
        given: what the command line says instead.

    Raises:
        ValueError: it is none.
    """
    option, units, example = _QUANTITIES[variable]
    said = f"{option} {given}" if given else f"{variable}={os.environ.get(variable)}"
    text = given or os.environ.get(variable)
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in units or not float(match[1]):
        known = ", ".join(unit for unit in units if unit)
        raise ValueError(f"{said}: write a number and one of {known}, as in {example}")
    return float(match[1]) * units[match[2].lower()]


def address(name: str, said: str) -> str:
    """Return an address as it was said; ValueError names its option or variable if it is none."""
    try:
        parse_address(said)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return said


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"; ValueError says what is wrong with it."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    ambiguous = ":" in bare and not (host.startswith("[") and host.endswith("]"))
    valid = bool(colon and bare and not ambiguous and port.isdecimal() and port.isascii())
    if not valid or int(port) > 65535:
        msg = f"cannot listen at {address!r}: write HOST:PORT, as in 127.0.0.1:13377 or [::1]:13377"
        raise ValueError(msg)
    return bare, int(port)
