"""Libraries that are extras: without one, an error says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(what: str, library: str, extra: str = "") -> Iterator[None]:
    """Turn the import of a library that is not installed into what to type.

    Args:
        what: it is needed for.
        library: name of it.
        extra: of ddpprobe that brings it; "": that of the same name.

    Raises:
        ImportError: it is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != library:
            raise
        hint = f"pip install 'ddpprobe[{extra or library}]'"
        raise ImportError(f"{what} needs {library}, which is not installed: {hint}") from error
