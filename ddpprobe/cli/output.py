"""Text and JSON for a person, a pipe or a script; names from a store are not trusted."""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from ddpprobe.errors import RunError
from ddpprobe.reader.text import plain

OK, PAGED, USAGE, DAMAGED, INCOMPLETE = 0, 1, 2, 3, 4  # exit codes
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell reports SIGINT and SIGPIPE
STDOUT = "-"  # as the path of a file to write


def say(text: str) -> None:
    """Print one line on stdout, escaped as the terminal's encoding needs it.

    Raises:
        RunError: stdout takes no more, as its disk is full.
    """
    with _told_of_stdout():
        _write(sys.stdout, text)


def flush() -> None:
    """Write what is buffered for stdout; raises as `say`."""
    with _told_of_stdout():
        sys.stdout.flush()


def discard_stdout() -> None:
    """Let what is still buffered go nowhere, or the interpreter would complain when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _told_of_stdout() -> Iterator[None]:
    """Say of an error that it is stdout's; a closed pipe is none."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise RunError(f"standard output takes no more: {error}") from error


def complain(text: str) -> None:
    """Print one line on stderr."""
    _write(sys.stderr, text)


def colours(stream: TextIO) -> bool:
    """Return whether to colour: only on a terminal, and not where NO_COLOR is set to anything."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say_json(value: Mapping[str, Any]) -> None:
    """Print one strict JSON object: NaN and infinities, which JSON has not, become null."""
    say(json.dumps(_strict(value), indent=2))


class Shown(io.RawIOBase):
    """UTF-8 text on its way to a terminal, in `plain` lines.

    Args:
        stream: where they go.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def writable(self) -> bool:
        """Say that it takes bytes."""
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401  (any buffer)
        """Show a piece of the text, which may end within a character."""
        with _told_of_stdout():
            self._stream.write("\n".join(map(plain, self._decode(bytes(data)).split("\n"))))
        return len(data)


class _Whole(io.RawIOBase):
    """Bytes on their way to stdout as they are."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401  (any buffer)
        with _told_of_stdout():
            return self._stream.write(data)


def stdout_bytes() -> BinaryIO:
    """Return where a file goes that is written to stdout: as it is, or `plain` on a terminal.

    To write to it raises as `say`.
    """
    shown = Shown(sys.stdout) if sys.stdout.isatty() else _Whole(sys.stdout.buffer)
    return cast("BinaryIO", shown)


def report_gaps(lost: Iterable[object], unknown: Iterable[str] = ()) -> int:
    """List on stderr what is lost of a run, and what of it is not known.

    Args:
        lost: what is damaged or missing.
        unknown: `Completeness.unknown`: what is not held.

    Returns:
        The exit code: 3 if anything is lost, else 4 if anything is not known, else 0.
    """
    damaged, incomplete = _complain_of("lost", lost), _complain_of("not known", unknown)
    return DAMAGED if damaged else INCOMPLETE if incomplete else OK


def _complain_of(what: str, things: Iterable[object]) -> bool:
    texts = [plain(thing) for thing in things]
    for text in texts:
        complain(f"ddpprobe: {what}: {text}")
    return bool(texts)


def check_file(file: Path, name: str) -> None:
    """Raise RunError, which says what to type, if no file can be written here.

    Args:
        file: where it is to be written.
        name: of a file that may be written into a directory that was given in its place.
    """
    if file.is_dir():
        raise RunError(f"{file}: a directory; give the file to write: -o {file / name}")
    check_place(file)


def check_place(file: Path) -> None:
    """Raise RunError, which says what to type, if a file's directory takes no file."""
    above = file.parent
    if not above.is_dir():
        raise RunError(f"{file}: there is no directory {above}; make it first: mkdir -p {above}")
    if not (os.access(above, os.W_OK) or (file.exists() and os.access(file, os.W_OK))):
        where = above.absolute()
        raise RunError(f"{file}: no file can be written in {where}; give -o PATH in another one")


@contextmanager
def told_of_file(file: Path) -> Iterator[None]:
    """Say of an error that a file to be written met it, and what to type."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        why = error.strerror or str(error)
        raise RunError(f"{file}: cannot be written ({why}); give -o PATH elsewhere") from error


def table(rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> list[str]:
    """Lay rows out in columns two spaces apart; the columns in `right` are right-aligned."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    flush = set(right)
    return [
        "  ".join(
            cell.rjust(width) if i in flush else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _write(stream: Any, text: str) -> None:  # noqa: ANN401  (any text stream)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _strict(value: Any) -> Any:  # noqa: ANN401  (any JSON value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return value
