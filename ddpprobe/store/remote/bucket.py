"""Objects below one URL of S3, Google Cloud Storage or Azure: read, written, listed, deleted.

The only place that imports `obstore`. Every request is bounded in time, and whatever goes wrong is
one exception with one line of text, in which neither a query (Azure signs there) nor the server's
own document stands. An object appears whole or not at all.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, NotFoundError
from obstore.store import from_url

from ddpprobe.rundir import paths, store_url
from ddpprobe.rundir.fuse import first_line

CONNECT_SECONDS, REQUEST_SECONDS = 5, 30
RETRIES, RETRY_SECONDS = 2, 10
AT_ONCE = 4  # objects on their way
PART_BYTES = 8 << 20  # of a large file, of which two are in memory
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT",
             "AZURE_ENDPOINT")  # fmt: skip
R = TypeVar("R")
_QUERY, _LONG = re.compile(r"\?\S*"), 120
# In what obstore says of a name that it cannot parse.
_NAME = re.compile(r'Path "(.*?)"(?::| contained)', re.DOTALL)


class BucketError(Exception):
    """The object store did not do what it was asked for; the text is one line."""


class TooLargeError(BucketError):
    """An object holds more than anybody should take in."""


class Bucket:
    """What lies below one URL.

    Credentials, region and endpoint come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
    Plain HTTP is spoken only with an endpoint that says so.

    Args:
        url: as `store_url.parse` returns it.

    Raises:
        BucketError: the environment makes no sense.
    """

    def __init__(self, url: str) -> None:
        self.url = store_url.parse(url)
        self._stopped = False
        prefix = store_url.VARIABLES[self.url.partition("://")[0]]
        endpoints = [os.environ.get(n, "") for n in ENDPOINTS if n.startswith(prefix)]
        plain = any(endpoint.startswith("http://") for endpoint in endpoints)
        with _explained("the settings"):
            self._store = from_url(
                self.url,
                client_options={
                    "allow_http": plain,
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=REQUEST_SECONDS),
                },
                retry_config={
                    "max_retries": RETRIES,
                    "retry_timeout": timedelta(seconds=RETRY_SECONDS),
                },
            )

    def read(self, key: str, most: int) -> bytes | None:
        """Return an object; None if there is none.

        Raises:
            BucketError: it could not be had.
            TooLargeError: it holds more than `most` bytes.
        """
        data = bytearray()
        with _explained(key):
            try:
                for piece in obstore.get(self._store, key).stream(PART_BYTES):
                    data += piece
                    if len(data) > most:
                        break
            except (NotFoundError, FileNotFoundError):
                return None
        if len(data) > most:
            raise TooLargeError(f"{key}: more than {most} bytes")
        return bytes(data)

    def fetch(
        self, files: Sequence[tuple[str, Path, int]], advance: Callable[[int], None]
    ) -> list[tuple[int, int] | None]:
        """Write objects to files, several at a time, each file all at once.

        Args:
            files: key, where to, and the most bytes that are taken of it.
            advance: told 1 for each.

        Returns:
            Bytes and crc32 of what was taken; None where there is no such object.

        Raises:
            BucketError: one could not be had.
            OSError: the disk refused.
        """

        def one(key: str, path: Path, most: int) -> tuple[int, int] | None:
            found = self._fetch(key, path, most)
            advance(1)
            return found

        return self.together([partial(one, *file) for file in files])

    def _fetch(self, key: str, path: Path, most: int) -> tuple[int, int] | None:
        with _explained(key):
            try:
                pieces = obstore.get(self._store, key).stream(PART_BYTES)
            except (NotFoundError, FileNotFoundError):
                return None
        paths.make_inner(path.parent)
        size = crc = 0
        with paths.replacing(path) as fd, _explained(key):
            for piece in pieces:
                part = bytes(piece)[: most - size]
                paths.write_all(fd, [part])
                size, crc = size + len(part), zlib.crc32(part, crc)
                if size >= most:
                    break
        return size, crc

    def write(self, key: str, data: bytes) -> None:
        """Put an object. Raises BucketError."""
        with _explained(key):
            obstore.put(self._store, key, data)

    def create(self, key: str, data: bytes, most: int) -> bytes:
        """Put an object if there is none, and return what lies there then: of several, the first.

        A store that knows no conditional requests takes the last of those that come at once.

        Args:
            key: of the object.
            data: its content.
            most: bytes that are taken of another's.

        Raises:
            BucketError: it was refused, or what is there could not be had.
        """
        there = self.read(key, most)
        if there is None:
            with _explained(key):
                try:
                    obstore.put(self._store, key, data, mode="create", use_multipart=False)
                except AlreadyExistsError:  # or our own, whose answer was lost on its way
                    there = self.read(key, most)
                except (BaseError, NotImplementedError) as error:
                    if not _is_unknown(error):
                        raise
                    obstore.put(self._store, key, data)
        return data if there is None else there

    def write_files(
        self,
        files: Sequence[tuple[str, Callable[[], bytes | Path | None]]],
        arrived: Callable[[str], None],
    ) -> None:
        """Put objects, several at a time, from memory or in parts from a file.

        Args:
            files: key, and what returns the content when its turn has come; None: leave it out.
            arrived: told the key of each one that has arrived.

        Raises:
            BucketError: one was refused; others may have arrived.
        """

        def one(key: str, load: Callable[[], bytes | Path | None]) -> None:
            data = load()
            if data is None:
                return
            with _explained(key):
                obstore.put(self._store, key, data, chunk_size=PART_BYTES, max_concurrency=2)
            arrived(key)

        self.together([partial(one, *file) for file in files])

    def stop(self) -> None:
        """Begin nothing any more: what is under way ends within the time of a request."""
        self._stopped = True

    def together(self, jobs: Sequence[Callable[[], R]], at_once: int = AT_ONCE) -> list[R]:
        """Run jobs, a few at a time; the first one that fails ends all, and is raised."""
        with ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(self._unless_stopped, job) for job in jobs]
            wait(futures, return_when=FIRST_EXCEPTION)
            pool.shutdown(wait=True, cancel_futures=True)
            for failed in (f for f in futures if not f.cancelled() and f.exception()):
                failed.result()
            return [future.result() for future in futures]

    def _unless_stopped(self, job: Callable[[], R]) -> R:
        if self._stopped:
            raise BucketError("given up")
        return job()

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are gone already are not missed. Raises BucketError."""
        for key in keys:
            with _explained(key):
                try:
                    obstore.delete(self._store, key)
                except (NotFoundError, FileNotFoundError):
                    continue

    def names(self, prefix: str) -> Iterator[tuple[str, int, str]]:
        """Yield (key, bytes, tag of its content) of the objects below `prefix`.

        Raises:
            BucketError: they could not be listed.
        """
        with _explained(f"{prefix}/"):
            for page in obstore.list(self._store, prefix):
                for entry in page:
                    yield str(entry["path"]), int(entry["size"]), str(entry["e_tag"] or "")


def _is_unknown(error: Exception) -> bool:
    """Whether a request failed because the object store knows no such request."""
    return isinstance(error, NotImplementedError) or "501 Not Implemented" in str(error)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except InvalidPathError as error:  # of a listing, which ends with it
        match = _NAME.search(str(error))
        name = f"{match[1]!a:.{2 * _LONG}}" if match else "nobody says which"
        raise BucketError(
            f"{what}: an object there has a name that cannot be read ({name}). ddpprobe makes no "
            "such names: delete it"
        ) from None
    except (BaseError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of our own disk
        text = _QUERY.sub("", first_line(error).partition("<")[0]).strip(" :")
        if len(text) > 2 * _LONG:  # what happened stands at its end
            text = f"{text[:_LONG]} ... {text[-_LONG:]}"
        kind = type(error).__name__
        raise BucketError(f"{what}: {text or kind} ({kind})") from None
