"""Variables of the environment that switch something on: the words for it."""

from __future__ import annotations

import os

YES, NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
STRICT = "DDPPROBE_STRICT"


def is_on(variable: str) -> bool:
    """Return whether a variable switches something on; what is no word for it does not."""
    return _said(variable) in YES


def check(variable: str) -> None:
    """Raise ValueError if a variable says neither yes nor no."""
    said = _said(variable)
    if said not in (*YES, *NO):
        raise ValueError(f"{variable}={said:.200}: write {variable}=1, or unset it")


def _said(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()
