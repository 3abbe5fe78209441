"""Which versions of Python and torch the tests have been run on; others are told, not refused."""

from __future__ import annotations

import functools
import logging
import platform

import torch

PYTHONS = ("3.11",)
TORCHES = ("2.13",)

logger = logging.getLogger("ddpprobe")


@functools.cache  # once in a process, however many runs it has
def tell_untried() -> None:
    """Say in one line that this Python or torch was not tried, if that is so."""
    if line := untried(platform.python_version(), torch.__version__):
        logger.warning("ddpprobe: %s", line)


def untried(python: str, torch_version: str) -> str:
    """Return what to say of these versions; "" if both were tried."""
    here = [
        f"{name} {version}"
        for name, version, tried in (("Python", python, PYTHONS), ("torch", torch_version, TORCHES))
        if ".".join(version.split(".")[:2]) not in tried
    ]
    if not here:
        return ""
    return (
        f"it was not tried on {' and '.join(here)}, but on Python {', '.join(PYTHONS)} and torch "
        f"{', '.join(TORCHES)}"
    )
