"""Where things lie inside a run directory, and who may hold it.

::

    RUN/
      run.json                              identity and topology, written once by rank 0
      run.lock                              flock, held by rank 0 of the live attempt
      journal/000/node_0000/rank_00003/     frames of one rank of one attempt
      journal/000/node_0000/daemon/         frames of that node's daemon (merged steps, anomalies)
      journal/000/claim.json                whose this attempt is, in the object store too
      heartbeat/000/node_0000/rank_00003    where the rank is now (fixed size, overwritten)
      heartbeat/000/node_0000/memory        the directory in memory where these are newer (`tmpfs`)
      heartbeat/000/node_0000/pace          how far apart sampled steps are now, under a budget
      heartbeat/000/node_0000/orders        what all ranks are to do at which steps
      captures/000/node_0000/rank_00003/    packs: full tensors of one rank, one file per step
      daemon/node_0000.{lock,json,log}      who serves this node
      daemon/node_0001.secret               by which this node's pushes are known to the head
      daemon/node_0000.roster               the head's: which node speaks for which ranks
      daemon/disk                           by which other nodes tell whether they see it
      daemon/requests/                      what `ddpprobe trigger` asks of the head's daemon
      run.zarr/                             the store

Directories are 0700 and files 0600: names of modules and hosts are nobody else's business.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpprobe.rundir import safe_read
from ddpprobe.rundir.own_descriptor import OwnDescriptor
from ddpprobe.rundir.validate import MALFORMED

RUN_JSON = "run.json"
RUN_LOCK = "run.lock"
OWN_DISK = "own_disk"  # in the run.json of a node that shares no directory with the head: its name
UPLOAD = "upload"  # suffix of what a daemon says of an upload that ended incomplete
FORMAT_VERSION = 1  # what is written; when it rises: docs/reference/store-format.md, Versions
DIR_MODE = 0o700
FILE_MODE = 0o600
_PATIENCE = 5  # looks, 20 ms apart, at a lock that somebody may only be looking at
_VECTORS = 512  # buffers per writev; the kernel takes 1024
JOURNAL, _HEARTBEAT, _CAPTURES, _DAEMON = "journal", "heartbeat", "captures", "daemon"
PARTS = (JOURNAL, _HEARTBEAT, _CAPTURES, _DAEMON, safe_read.MANIFESTS, safe_read.STORE)
# The directories of a run below its own: somebody else's links in there are not followed.
_INNER = re.compile(
    rf"(.*?)/((?:{JOURNAL}|{_HEARTBEAT}|{_CAPTURES})/\d{{3,}}(?:/node_\d{{4,}}(?:/[^/]+)?)?"
    rf"|{_DAEMON}(?:/requests|/[^/]+\.inbox/\d+/[^/]+)?"
    rf"|{safe_read.MANIFESTS}|{re.escape(safe_read.STORE)}(?:/.+)?)",
    re.DOTALL,
)
SD_VARIABLE = "DDPPROBE_SD_DIR"
RUN_VARIABLE = "DDPPROBE_DIR"
RUN_OPTIONS_VARIABLE = "DDPPROBE_RUN"  # keywords of `install()` as JSON, from `ddpprobe run`
RUNS = Path("ddpprobe-runs")  # where `install` makes a run's directory if nobody says where
LOCK_SECONDS = 10.0  # for another node's daemon to write what all nodes share


def readable(current: int = FORMAT_VERSION) -> range:
    """Return the format versions that are read: the current one, and the one before it."""
    return range(max(current - 1, 1), current + 1)


def unreadable(version: object) -> str:
    """Say why what is of a format version cannot be read, and what to do; "" if it can."""
    known = readable()
    if type(version) is not int:
        return f"its format_version is {version!r:.40}, where a whole number was expected"
    if version in known:
        return ""
    reads = " and ".join(map(str, known))
    if version > known[-1]:
        word, advice = "a newer", "pip install -U ddpprobe"
    else:
        word = "an older"
        advice = "pip install the last one that reads it, which its CHANGELOG.md names"
    return (
        f"written by {word} ddpprobe (format_version {version}, this one reads {reads}); {advice}"
    )


def continued(data: bytes, where: object, instead: str = "a new directory") -> dict[str, Any]:
    """Return what the run.json of a run says that another attempt is to continue.

    Args:
        data: content of it.
        where: the run lies, for the message.
        instead: what to give `run_dir=`, for the message.

    Raises:
        ValueError: it is damaged, or of a format version that this ddpprobe does not write.
    """
    try:
        found = dict(safe_read.parse(data))
        version = found["format_version"]
    except MALFORMED:
        why = f"its {RUN_JSON} is damaged"
    else:
        if version == FORMAT_VERSION:
            return found
        why = unreadable(version) or f"its format_version {version} is only read, not written"
    raise ValueError(f"{where} cannot be continued: {why}. Give run_dir= {instead}.")


def sd_dir() -> Path | None:
    """Return where daemons say at which address they are to be scraped (see `targets`).

    That is $DDPPROBE_SD_DIR, which machines may share, else this user's directory on this machine;
    None if the variable is empty: then it is not said.
    """
    given = os.environ.get(SD_VARIABLE)
    if given is None:
        return own_sd_dir()
    return Path(given).absolute() if given else None


def own_sd_dir() -> Path:
    """Return this user's directory of targets on this machine.

    Not below $TMPDIR, which a job may have for itself, nor in a home that other machines share.
    """
    return Path("/tmp") / f"ddpprobe-{os.geteuid()}" / "targets"  # noqa: S108  (0700, looked at)


def node_name(index: int) -> str:
    """Return the directory name of a node: its torchrun GROUP_RANK in four digits."""
    return f"node_{index:04d}"


def rank_name(rank: int) -> str:
    """Return the directory name of a rank."""
    return f"rank_{rank:05d}"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run directory. Nothing is created but by `make_dir`."""

    path: Path

    @property
    def run_json(self) -> Path:
        """Identity of the run."""
        return self.path / RUN_JSON

    @property
    def lock(self) -> Path:
        """Lock file of the live attempt."""
        return self.path / RUN_LOCK

    @property
    def store(self) -> Path:
        """Root of the Zarr hierarchy."""
        return self.path / safe_read.STORE

    @property
    def manifests(self) -> Path:
        """Directory of the store's manifests and locks."""
        return self.path / safe_read.MANIFESTS

    @property
    def has_store(self) -> bool:
        """Whether anything was ever folded; without it zarr need not be imported."""
        return self.store.exists() or self.manifests.exists()

    def manifest_names(self) -> list[str]:
        """Names of the files in `manifests`."""
        return safe_read.names(self.path, safe_read.MANIFESTS)

    def attempt_dir(self, attempt: int) -> Path:
        """Journals of one attempt, one directory per node."""
        return self.path / JOURNAL / f"{attempt:03d}"

    def rank_journal(self, attempt: int, node: str, rank: int) -> Path:
        """Journal directory of one rank."""
        return self.attempt_dir(attempt) / node / rank_name(rank)

    def daemon_journal(self, attempt: int, node: str) -> Path:
        """Journal directory of a node's daemon."""
        return self.attempt_dir(attempt) / node / "daemon"

    def _heartbeats(self, attempt: int, node: str) -> Path:
        """Directory of the small files that are overwritten in place."""
        return self.path / _HEARTBEAT / f"{attempt:03d}" / node

    def heartbeat(self, attempt: int, node: str, rank: int) -> Path:
        """Heartbeat file of one rank."""
        return self._heartbeats(attempt, node) / rank_name(rank)

    def pace(self, attempt: int, node: str) -> Path:
        """File in which rank 0 tells the ranks of a node which steps are sampled."""
        return self._heartbeats(attempt, node) / "pace"

    def claim(self, attempt: int) -> Path:
        """File that says, if the run goes to an object store, whose this attempt is."""
        return self.attempt_dir(attempt) / "claim.json"

    def orders(self, attempt: int, node: str) -> Path:
        """Board on which a node's daemon tells its ranks what to do at which steps."""
        return self._heartbeats(attempt, node) / "orders"

    def captures(self, attempt: int, node: str, rank: int) -> Path:
        """Directory of one rank's packs."""
        return self.path / _CAPTURES / f"{attempt:03d}" / node / rank_name(rank)

    def pack(self, attempt: int, node: str, rank: int, step: int) -> Path:
        """File of the full tensors that one rank kept of one step."""
        return self.captures(attempt, node, rank) / f"step_{step:010d}.pack"

    @property
    def requests(self) -> Path:
        """Directory of what users ask of the head's daemon, one small JSON file each."""
        return self.path / _DAEMON / "requests"

    def daemon_file(self, node: str, suffix: str) -> Path:
        """Return the daemon's `lock`, `json` or `log` file for a node."""
        return self.path / _DAEMON / f"{node}.{suffix}"

    def attempts(self) -> list[int]:
        """Attempts that left a journal, ascending."""
        found = safe_read.directories(self.path, JOURNAL)
        return sorted(int(n) for n in found if n.isdecimal())


def make_dir(path: Path) -> Path:
    """Create a directory and its parents with mode 0700, whatever the umask; return it."""
    if path.is_dir():  # as almost always
        return path
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=DIR_MODE)
    for created in missing:
        created.chmod(DIR_MODE)
    return path


def make_inner(path: Path) -> Path:
    """Create a directory inside a run as `make_dir`, but never the run's own: it was deleted.

    Raises:
        FileNotFoundError: the run's own directory is gone.
    """
    if path.is_dir():
        return path
    match = _INNER.fullmatch(str(path))
    if match and not Path(match[1] or "/").exists():
        raise FileNotFoundError(errno.ENOENT, "the run directory is gone", match[1])
    return make_dir(path)


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run to write to it, or make it with mode 0600; return its descriptor.

    A run may lie in a directory of somebody else, who could have us write to what they point at.
    So no link is followed, neither in place of the file nor of a directory inside the run, and a
    file that is there must be a regular one of this user's.

    Args:
        path: of the file; its directory is there.
        flags: of `os.open`; O_CREAT goes without saying.

    Raises:
        OSError: it is a link, or no regular file, or the disk refuses.
        PermissionError: it belongs to another user.
    """
    with _directory(path.parent) as directory:
        return _open_in(directory, path, flags)


@contextlib.contextmanager
def _directory(directory: Path) -> Iterator[int]:
    """Open a directory by its path; links are followed on the way to the run, and not in it."""
    match = _INNER.fullmatch(str(directory))
    root, parts = (match[1] or "/", match[2].split("/")) if match else (str(directory), [])
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    fd = os.open(root, flags)
    for number, part in enumerate(parts, 1):
        try:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=fd)
        except OSError as error:
            _explain(error, "/".join((root, *parts[:number])))
            raise
        finally:
            os.close(fd)
        fd = inner
    try:
        yield fd
    finally:
        os.close(fd)


def _open_in(directory: int, path: Path, flags: int, mode: int = FILE_MODE) -> int:
    shorten = flags & os.O_TRUNC
    flags = (flags & ~os.O_TRUNC) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    new = flags | os.O_CREAT | os.O_EXCL
    try:
        try:
            return os.open(path.name, new, mode, dir_fd=directory)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        fd = os.open(path.name, flags, dir_fd=directory)
    except OSError as error:
        _explain(error, str(path))
        raise
    try:
        _refuse_foreign(fd, directory, path)
        if shorten:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _explain(error: OSError, path: str) -> None:
    """Say of which file an error is, and what ELOOP and its like mean here."""
    error.filename = path
    if Path(path).is_symlink():
        error.strerror = "a symbolic link, which is not followed inside a run"


def _refuse_foreign(fd: int, directory: int, path: Path) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    # Where a file system gives all files to one user (root_squash), ours are that user's.
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_new(directory):
        why = f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
        raise PermissionError(errno.EPERM, why, str(path))


def _owner_of_new(directory: int) -> int:
    """Return whose a file is that this process makes."""
    name = f".{os.urandom(8).hex()}.owner"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0, dir_fd=directory)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=directory)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a small JSON file, on the disk before it returns; its directory is there."""
    with replacing(path) as fd:
        write_all(fd, [json.dumps(value, indent=1).encode()])
        os.fsync(fd)


def replace_file(
    path: Path, parts: Iterable[bytes | memoryview], *, made: Path | None = None,
    durable: bool = False,
) -> None:  # fmt: skip
    """Replace a file of a run, or make it, as `replacing`; its directory is made.

    Args:
        path: of the file.
        parts: of its content, one after the other.
        made: see `replacing`; its directory is made, too.
        durable: wait until the content is on the disk, before it gets its name.

    Raises:
        OSError: the disk refuses; nothing is left behind.
    """
    make_inner(path.parent)
    if made is not None:
        make_inner(made.parent)
    with replacing(path, made) as fd:
        write_all(fd, parts)
        if durable:
            os.fdatasync(fd)


@contextlib.contextmanager
def replacing(path: Path, made: Path | None = None, mode: int = FILE_MODE) -> Iterator[int]:
    """Give a new file to write to, which then takes the place of `path`, or is gone.

    So a reader sees the old file or the new one, never a part. No link is followed, as in
    `open_own`.

    Args:
        path: of the file; its directory is there.
        made: name of the file before; what a killed writer left there is written over. By default
            one that nobody else has, beside `path`.
        mode: of the file, less the umask.
    """
    before = os.O_EXCL if made is None else os.O_TRUNC
    made = made or path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    with _directory(path.parent) as to, _directory(made.parent) as directory:
        fd = _open_in(directory, made, os.O_WRONLY | before, mode)
        try:
            try:
                yield fd
            finally:
                os.close(fd)
            os.replace(made.name, path.name, src_dir_fd=directory, dst_dir_fd=to)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made.name, dir_fd=directory)
            raise


def write_all(fd: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write all of it: a full disk writes short before it says so, a call takes only so much."""
    left = [memoryview(part) for part in parts]
    left = [part for part in left if part.nbytes]
    at = 0
    while at < len(left):
        written = os.writev(fd, left[at : at + _VECTORS])
        while at < len(left) and written >= left[at].nbytes:
            written -= left[at].nbytes
            at += 1
        if written:
            left[at] = left[at][written:]


class DirectoryLock:
    """An exclusive `flock` on one file, released by the kernel however its holder dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: OwnDescriptor | None = None

    def acquire(self) -> bool:
        """Take the lock; False if somebody else holds it, and not just to look (`is_locked`)."""
        if self._file is not None:
            return True
        fd = open_own(self.path, os.O_RDWR)
        for _ in range(_PATIENCE):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                self._file = OwnDescriptor(fd)
                return True
        os.close(fd)
        return False

    @contextlib.contextmanager
    def held(self, patience: float) -> Iterator[None]:
        """Hold the lock for as long as the context lasts.

        Args:
            patience: seconds to wait for whoever holds it now.

        Raises:
            TimeoutError: somebody else held it all the time.
        """
        deadline = time.monotonic() + patience
        while not self.acquire():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.path} was held by another process for {patience:.0f} s")
        try:
            yield
        finally:
            self.release()

    def forget(self) -> None:
        """In a forked child: close our copy of the file; the parent keeps the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self._file is not None and self._file.is_ours():
            fcntl.flock(self._file.number, fcntl.LOCK_UN)
        self.forget()


def is_locked(path: Path) -> bool:
    """Return whether some process holds the lock at `path`; looks by a moment's shared lock."""
    try:
        fd = safe_read.open_regular(path.parent, path.name)
    except OSError:  # there is none, or it is somebody else's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
