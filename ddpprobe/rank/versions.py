"""The pairs of Python and torch that hold in `make test-versions`; others are told, not refused."""

from __future__ import annotations

import functools
import logging
import platform

import torch

# torch by Python. The page of the reference, the workflows and the command are held to it.
TRIED: dict[str, tuple[str, ...]] = {
    "3.11": ("2.13", "2.14", "2.15"),
    "3.12": ("2.6",),
    "3.13": ("2.15",),
}

logger = logging.getLogger("ddpprobe")


@functools.cache  # once in a process, however many runs it has
def tell_untried() -> None:
    """Say in one line that this Python was not tried with this torch, if that is so."""
    if line := untried(platform.python_version(), torch.__version__):
        logger.warning("ddpprobe: %s", line)


def untried(python: str, torch_version: str) -> str:
    """Return what to say of a pair of versions; "" if it was tried."""
    if _minor(torch_version) in TRIED.get(_minor(python), ()):
        return ""
    return f"it was not tried on Python {python} with torch {torch_version}, but on {listed()}"


def listed() -> str:
    """Return the pairs that were tried, in words."""
    return "; ".join(f"Python {p} with torch {', '.join(t)}" for p, t in TRIED.items())


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
