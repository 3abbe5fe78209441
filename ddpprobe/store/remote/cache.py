"""Where copies of runs in object stores lie, and of which URL each is one."""

from __future__ import annotations

import os
from pathlib import Path

from ddpprobe.rundir import safe_read, store_url

MARKER = "mirror.json"  # in a copy: of which URL it is one


def cache_home() -> Path:
    """Return where copies lie: `$XDG_CACHE_HOME/ddpprobe`, by default `~/.cache/ddpprobe`."""
    home = os.environ.get("XDG_CACHE_HOME")
    top = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    return top / "ddpprobe"


def url_of(path: Path) -> str | None:
    """Return the URL of which a directory is our copy; None if it is a run of its own.

    What lies elsewhere than in our cache may say what it likes.
    """
    if path.parent != cache_home():
        return None
    try:
        told = safe_read.parse(safe_read.read_regular(path, MARKER, 4096))
    except (OSError, ValueError):
        return None
    url = told.get("url") if isinstance(told, dict) else None
    return url if store_url.is_store(url) else None
