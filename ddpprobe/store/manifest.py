"""What a group of the store consists of: every committed file with its length and checksum.

A chunk that was deleted reads as the fill value, without an error, under every codec; only a list
of what must be there can tell. The list is a log beside the hierarchy (`RUN/manifest/<group>.log`),
one checksummed frame per commit, appended *before* any file that already exists is replaced: so
each file on disk is always the version of the last line, or the one before it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.safe_read import read_regular as read_regular  # noqa: PLC0414  (the store's way in)
from ddpprobe.rundir.validate import MALFORMED

GROUP_JSON = "zarr.json"
EXPIRED = ":expired"  # among what is consumed: blocks of steps that retention took away
READ_BYTES = 4 << 20
MAX_LOG_BYTES = 32 << 20
MAX_SEARCH_BYTES = 256 << 20  # checksummed in search of a frame after damaged bytes
MAX_FILES = 1 << 20  # of a group, of which a reader keeps the list
_SHOWN = 3  # of what is lost; `ddpprobe verify` lists all
Version = tuple[int, int]  # length in bytes, crc32 (zlib)


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that was written down and cannot be read any more.

    Attributes:
        where: path inside the run, e.g. `run.zarr/attempt_000/rank_00003/counts`.
        steps: first and last optimizer step concerned, None where that is unknown.
        why: in words.
    """

    where: str
    steps: tuple[int, int] | None
    why: str

    def __str__(self) -> str:
        span = f", steps {self.steps[0]} to {self.steps[1]}" if self.steps else ""
        return f"{self.where}{span}: {self.why}"


class Losses(list[Lost]):
    """What is lost of a run: a list, of which a notebook shows the first."""

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self[:_SHOWN]))
        return f"[{first}, ... {len(self)} in all]" if len(self) > _SHOWN else f"[{first}]"


@dataclass(slots=True)
class Consumed:
    """Which frames of one journal are in the group: all below `through`, and those in `ahead`."""

    through: int = 0
    ahead: frozenset[int] = frozenset()

    def has(self, seq: int) -> bool:
        """Return whether the frame need not be looked at again."""
        return seq < self.through or seq in self.ahead

    def advanced(self, taken: set[int], waiting: set[int], end: int) -> Consumed:
        """Return the state after `taken`, with `waiting` still to come, of frames below `end`."""
        through = max(self.through, min(waiting, default=end))
        return Consumed(through, frozenset(s for s in self.ahead | taken if s > through))


@dataclass(slots=True)
class State:
    """Sizes of the dimensions, progress in the journals, and the files, after one commit."""

    sizes: dict[str, int] = field(default_factory=dict)
    consumed: dict[str, Consumed] = field(default_factory=dict)
    files: dict[str, Version] = field(default_factory=dict)


class Manifest:
    """The log of one group, read from disk; `append` adds a commit.

    Args:
        path: of the log.
        data: what is in it, where that was read already.

    Attributes:
        state: after the last line.
        replaced: what the last line replaced: key -> version, None for files that it added.
        undone: the last line says that the one before it did not happen.
        exists: whether there is a log at all.
        damage: damaged places in the log, in words.
        lines: number of lines.
        torn: bytes at its end that never became a line (its writer died): no damage.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        self.path = path
        self.state = State()
        self.replaced: dict[str, Version | None] = {}
        self.damage: list[str] = []
        self.exists = False
        self.undone = False
        self.torn = 0
        self._before = State()  # its `files` stay empty: `replaced` has the difference
        self.lines = 0
        self._end = 0
        self._load(data)

    @property
    def partial(self) -> Path:
        """Name of a file of the group, or of the log, until it is written and gets its own."""
        return self.path.with_suffix(".partial")

    def versions(self, key: str) -> set[Version]:
        """Return what the file may be: the last version, or the one that it is to replace."""
        found = {self.state.files.get(key), self.replaced.get(key)}
        return {v for v in found if v is not None}

    def append(self, state: State, changed: Mapping[str, Version | None], *, durable: bool) -> None:
        """Log a commit that is about to happen: new versions of files, None for one that goes.

        Raises:
            OSError: the disk refused; the log is as it was, or ends in torn bytes.
        """
        self._write(_line(state, changed), durable=durable)

    def undo(self, *, durable: bool) -> None:
        """Log that the last line did not happen; what it left on disk remains acceptable."""
        self._write({"undo": True}, durable=durable)

    def rolled_back(self) -> State:
        """Return the state before the last line."""
        files = dict(self.state.files)
        for key, old in self.replaced.items():
            files.pop(key, None)
            if old is not None:
                files[key] = old
        return State(dict(self._before.sizes), dict(self._before.consumed), files)

    def _write(self, line: Mapping[str, Any], *, durable: bool) -> None:
        paths.make_inner(self.path.parent)
        payload = framing.encode_json(line)
        frame = framing.encode_frame(framing.META, self.lines, payload)
        fd = paths.open_own(self.path, os.O_WRONLY)
        try:
            os.ftruncate(fd, self._end)
            os.lseek(fd, self._end, os.SEEK_SET)
            paths.write_all(fd, [frame])
            if durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        self._take(framing.Frame(framing.META, self.lines, payload))
        self._end += len(frame)
        self.exists, self.torn = True, 0

    def _load(self, data: bytes | None) -> None:
        try:
            if data is None:
                key = f"{self.path.parent.name}/{self.path.name}"
                data = read_regular(self.path.parent.parent, key, MAX_LOG_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            self.exists = True
            self.damage.append(f"cannot be read: {error}")
            return
        self.exists = True
        at = 0
        while at < len(data):
            try:
                frame, end = framing.decode_frame(data, at)
                at = end
                self._take(frame)
            except framing.FrameError as error:
                following = next_frame(data, at + 1)
                if following < 0:
                    self._stop(error, len(data) - at)
                    break
                self.damage.append(f"bytes {at} to {following} are damaged")
                at = following
            except MALFORMED as error:
                self.damage.append(f"a line before byte {at} makes no sense: {error}")
        self._end = len(data) - self.torn

    def _stop(self, error: framing.FrameError, left: int) -> None:
        if error.torn:
            self.torn = left
        else:
            self.damage.append(f"the last {left} bytes are damaged: {error}")

    def _take(self, frame: framing.Frame) -> None:
        line = frame.json()
        if frame.seq != self.lines:
            self.damage.append(f"line {frame.seq} follows where {self.lines} was due")
        self.lines = frame.seq + 1
        self.undone = bool(line.get("undo"))
        if self.undone:
            state = self.rolled_back()
            replaced = {k: self.state.files.get(k) for k in self.replaced}
        else:
            sizes = {k: int(n) for k, n in line["sizes"].items()}
            consumed = {
                k: Consumed(int(through), frozenset(map(int, ahead)))
                for k, (through, ahead) in line["consumed"].items()
            }
            if len(line["files"]) + len(self.state.files) > MAX_FILES:
                raise ValueError(f"more than {MAX_FILES} files")
            state = State(sizes, consumed, self.state.files)
            replaced = _take_over(line["files"], self.state.files)
        self._before = State(self.state.sizes, self.state.consumed)
        self.state, self.replaced = state, replaced


def in_two_lines(before: State, after: State) -> bytes:
    """Return a log that says what `after` is, and what each file may be until all of it is there.

    To a reader it is the log of a group that was at `before` and is committed to `after`.
    """
    changed: dict[str, Version | None] = {
        k: v for k, v in after.files.items() if before.files.get(k) != v
    }
    changed |= dict.fromkeys(before.files.keys() - after.files.keys())
    lines = [_line(before, before.files)] if before.files else []
    lines.append(_line(after, changed))
    payloads = [framing.encode_json(line) for line in lines]
    return b"".join(framing.encode_frame(framing.META, i, p) for i, p in enumerate(payloads))


def _line(state: State, changed: Mapping[str, Version | None]) -> dict[str, Any]:
    return {
        "sizes": state.sizes,
        "consumed": {k: [c.through, sorted(c.ahead)] for k, c in state.consumed.items()},
        "files": {k: v and list(v) for k, v in sorted(changed.items())},
    }


def is_settled(root: Path, manifest: Manifest) -> bool:
    """Return whether the last commit was finished: the zarr.json written last is the new one.

    Raises:
        StoreDamaged: that file is neither the new one nor the one before.
    """
    try:
        version = version_of(read_regular(root, GROUP_JSON))
    except FileNotFoundError:
        version = None
    if version == manifest.state.files.get(GROUP_JSON):
        return True
    if GROUP_JSON not in manifest.replaced or version != manifest.replaced[GROUP_JSON]:
        word = "missing" if version is None else "damaged"
        msg = f"{root.name}/{GROUP_JSON} is {word}: it is not what was committed"
        raise StoreDamaged(msg)
    return False


def manifest_path(run: paths.RunDir, key: str) -> Path:
    """Return the log of a group; "" is the root of the hierarchy."""
    return run.manifests / f"{key.replace('/', '.') or 'root'}.log"


def _take_over(told: dict[str, Any], files: dict[str, Version]) -> dict[str, Version | None]:
    """Change `files` as a line says; return what was there."""
    replaced = {}
    for key, version in told.items():
        if version is None:
            replaced[key] = files.pop(key, None)
        else:
            size, crc = version
            replaced[key] = files.get(key)
            files[key] = int(size), int(crc)
    return replaced


def version_of(data: bytes) -> Version:
    """Return length and checksum of a file's content."""
    return len(data), zlib.crc32(data)


def version_of_file(file: BinaryIO) -> Version:
    """Return them of an open file, piece by piece, however large it is."""
    size = crc = 0
    while data := file.read(READ_BYTES):
        size, crc = size + len(data), zlib.crc32(data, crc)
    return size, crc


def next_frame(data: bytes, start: int) -> int:
    """Return where the next intact frame begins, or -1; its end if that takes too long to tell."""
    at, left = data.find(framing.MAGIC, start), MAX_SEARCH_BYTES
    while at >= 0:
        left -= min(framing.length_at(data, at), len(data) - at)
        if left < 0:
            return len(data)
        try:
            framing.decode_frame(data, at)
        except framing.FrameError:
            at = data.find(framing.MAGIC, at + 1)
        else:
            return at
    return -1
