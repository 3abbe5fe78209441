"""The URL of an object store that a run is uploaded to: checked before anything is done with it.

Nothing here talks to a network, nor imports the library that does: the training process only looks
whether it is there. Credentials come from the environment of whoever uploads or reads.
"""

from __future__ import annotations

import importlib.util
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

LIBRARY = "obstore"
INSTALL = "pip install 'ddpprobe[cloud]'"
# By scheme: what the variables begin with that hold credentials, region and endpoint.
VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
NETWORK = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy",
           "SSL_CERT_FILE", "SSL_CERT_DIR")  # fmt: skip
_KNOWN = "s3://BUCKET/PREFIX/RUN, gs://BUCKET/PREFIX/RUN or az://CONTAINER/PREFIX/RUN"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]*")
_FLATTENED = re.compile(r"(\w+):/[^/]")
_RUN_NAME = re.compile(r"(?!\.{1,2}$)[^/\0]{1,200}", re.DOTALL)


def is_url(place: object) -> bool:
    """Return whether a place is meant as a URL, and not as a directory."""
    return isinstance(place, str) and "://" in place


def is_store(place: object) -> bool:
    """Return whether a place is the URL of an object store."""
    return isinstance(place, str) and place.partition("://")[0] in VARIABLES and "://" in place


def parse(url: str) -> str:
    """Return a URL in its plain form, without a slash at its end.

    Raises:
        ValueError: it is none that can be used; the text never repeats a credential.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in VARIABLES:
        raise ValueError(
            f"{parts.scheme}:// is no object store that a run can lie in: write {_KNOWN}"
        )
    if parts.query or parts.fragment or "@" in parts.netloc or "?" in url or "#" in url:
        raise ValueError(
            f"a {parts.scheme}:// URL with a user, a password, a query or a fragment: write "
            f"{_KNOWN}; credentials come from the environment ({VARIABLES[parts.scheme]}...)"
        )
    path = [part for part in parts.path.split("/") if part]
    if not parts.netloc or not path or not all(_PART.fullmatch(p) for p in (parts.netloc, *path)):
        raise ValueError(
            f"{url!r}: write {_KNOWN}, each part of letters, digits and . _ - = + @, as in "
            "s3://my-bucket/team/run-42"
        )
    return f"{parts.scheme}://{'/'.join((parts.netloc, *path))}"


def wanted(place: object) -> str | None:
    """Return the URL that `install()` was given, ready to be used; None if it is a directory.

    Raises:
        ValueError: it is no path, or cannot be used, or the library for it is not installed here.
    """
    if place is None:
        return None
    if not is_url(place):
        directory = text_of(place)
        flat = _FLATTENED.match(directory)
        if flat and flat[1] in VARIABLES:
            raise ValueError(
                f"run_dir={directory!r}: a Path loses a slash of a URL. "
                f'Give it as a string: run_dir="{flat[1]}://..."'
            )
        return None
    url = parse(str(place))
    if importlib.util.find_spec(LIBRARY) is None:
        raise ValueError(f"run_dir={url!r} needs the library {LIBRARY}: {INSTALL}")
    return url


def text_of(place: object) -> str:
    """Return what `run_dir=` was given as a text. Raises ValueError for what is no path."""
    path = os.fspath(place) if isinstance(place, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(
            "run_dir must be a path or the URL of an object store, such as run_dir='runs/gpt' or "
            f"run_dir='s3://my-bucket/team/gpt', got {place!r:.200}"
        )
    return path


def is_run_name(name: object) -> bool:
    """Return whether a run may be called so: as the directory that it lies in."""
    return isinstance(name, str) and _RUN_NAME.fullmatch(name) is not None


def beside(url: str, run_id: str) -> str:
    """Return where a run goes if another one lies at its URL."""
    return parse(f"{url}.{run_id}")


def must_be(url: str | None, identity: Mapping[str, Any], run: os.PathLike[str]) -> None:
    """Raise ValueError if a run that is to be continued goes elsewhere than to `url`.

    Args:
        url: that `install()` was given; None: it was a directory.
        identity: what run.json says.
        run: the directory, for the message.
    """
    there = identity.get("destination")
    if url is not None and there not in {url, f"{url}.{identity.get('run_id')}"}:
        raise ValueError(
            f"{os.fspath(run)} is a run that goes to {there or 'no object store'}, not to {url}. "
            "Give name= a name of its own."
        )


def name_of(url: str) -> str:
    """Return the name of the run that lies at a URL."""
    return url.rpartition("/")[2]


def environment(url: str) -> dict[str, str]:
    """Return the variables that whoever uploads to `url` needs: credentials, endpoint, proxy."""
    prefix = VARIABLES[url.partition("://")[0]]
    return {k: v for k, v in os.environ.items() if k.startswith(prefix) or k in NETWORK}
