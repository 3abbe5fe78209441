"""Runs in an object store, as the reader sees them: a URL becomes the directory of a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddpprobe import destination
from ddpprobe.replay.cache import CopyError, url_of


def copy_of(url: str, advance: Callable[[int], None] = lambda _: None) -> Path:
    """Bring the copy of a run up to date; return its directory.

    Args:
        url: of the run, as `install(run_dir=...)` was given it.
        advance: told 1 for each file that was fetched.

    Raises:
        CopyError: the URL is none, or what lies there cannot be read; the text says what to do.
        OSError: the cache cannot be written.
    """
    try:
        plain = destination.parse(url)
    except ValueError as error:
        raise CopyError(str(error)) from error
    try:
        from ddpprobe.replay import mirror  # noqa: PLC0415
    except ModuleNotFoundError as error:
        text = f"{plain}: reading it needs the library {error.name}: {destination.INSTALL}"
        raise CopyError(text) from error
    return mirror.mirror(plain, advance)


def fetch_captured(
    path: Path, step: int | None = None, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Fetch captured arrays into a copy, as far as they are not there yet; nothing elsewhere.

    Args:
        path: a run directory.
        step: of this step; None: of all.
        advance: as above.

    Raises:
        CopyError, OSError: as above.
    """
    url = url_of(path)
    if url is not None:
        from ddpprobe.replay import mirror  # noqa: PLC0415

        mirror.fetch_captured(url, path, step, advance)
