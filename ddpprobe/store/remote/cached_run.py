"""Runs in an object store, as the reader sees them: a URL becomes the directory of a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddpprobe.errors import RunError
from ddpprobe.rundir import store_url
from ddpprobe.store.remote.cache import url_of


def copy_of(url: str, advance: Callable[[int], None] = lambda _: None) -> Path:
    """Bring the copy of a run up to date; return its directory.

    Args:
        url: of the run, as `install(run_dir=...)` was given it.
        advance: told 1 for each file that was fetched.

    Raises:
        RunError: the URL is none, or what lies there cannot be read; the text says what to do.
        OSError: the cache cannot be written.
    """
    try:
        plain = store_url.parse(url)
    except ValueError as error:
        raise RunError(str(error)) from error
    try:
        from ddpprobe.store.remote import download  # noqa: PLC0415
    except ModuleNotFoundError as error:
        text = f"{plain}: reading it needs the library {error.name}: {store_url.INSTALL}"
        raise RunError(text) from error
    return download.mirror(plain, advance)


def fetch_captured(
    path: Path, step: int | None = None, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Fetch captured arrays into a copy, as far as they are not there yet; nothing elsewhere.

    Args:
        path: a run directory.
        step: of this step; None: of all.
        advance: as above.

    Raises:
        RunError, OSError: as above.
    """
    url = url_of(path)
    if url is not None:
        from ddpprobe.store.remote import download  # noqa: PLC0415

        download.fetch_captured(url, path, step, advance)
