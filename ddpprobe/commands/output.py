"""Text and JSON for a person, a pipe or a script; names from a store are not trusted."""

from __future__ import annotations

import codecs
import io
import json
import math
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

OK, PAGED, USAGE, DAMAGED, INCOMPLETE = 0, 1, 2, 3, 4  # exit codes
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell reports SIGINT and SIGPIPE
# What the exit codes mean; the help of each verb and docs/reference/cli.md are made of these.
MEANINGS = {
    OK: "nothing wrong",
    PAGED: "a page was found, whatever --level shows",
    USAGE: "wrong use: an unknown option, site, statistic or rank; a missing, empty or foreign "
    "directory",
    DAMAGED: "damaged: what can be read is shown, each thing that is lost is a line on stderr",
    INCOMPLETE: "only a part of the run is held, or how it ended is not known; each gap is a line "
    "on stderr",
}
_READS = (OK, USAGE, DAMAGED, INCOMPLETE)
RETURNS: dict[str, tuple[int, ...]] = {
    "info": _READS,
    "anomalies": (OK, PAGED, USAGE, DAMAGED, INCOMPLETE),
    "trace": _READS,
    "verify": _READS,
    "collect": (OK, USAGE, DAMAGED),
    "compare": _READS,
    "top": _READS,
    "replay": _READS,
    "report": _READS,
    "export": _READS,
    "trigger": (OK, USAGE, DAMAGED),
    "daemon": (OK, USAGE),
    "up": (OK, USAGE),
}
UNOBSERVED = "-"  # there is no value; never printed as 0


def exits(verb: str | None = None) -> list[tuple[int, str]]:
    """Return the exit codes that a verb can end with (None: any), and what each means."""
    codes = MEANINGS if verb is None else RETURNS[verb]
    return [(code, MEANINGS[code] + _only(code, verb)) for code in codes]


def _only(code: int, verb: str | None) -> str:
    """Name the verbs that a code is of, where it is not of all that have to do with a run."""
    who = [name for name, codes in RETURNS.items() if code in codes]
    return f" (only {', '.join(who)})" if verb is None and len(who) == 1 else ""


def plain(text: object) -> str:
    """Return text without control characters, so that no name can move or colour the terminal.

    Control (Cc), format (Cf: bidirectional overrides) and lone surrogates (Cs) become `?`; what is
    left of an escape sequence is then harmless text. Line and paragraph separators count as well.
    """
    said, bad = str(text), {"Cc", "Cf", "Cs", "Zl", "Zp"}
    if said.isascii() and said.isprintable():  # almost every one
        return said
    return "".join("?" if unicodedata.category(c) in bad else c for c in said)


def say(text: str) -> None:
    """Print one line on stdout, escaped as the terminal's encoding needs it."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """Print one line on stderr."""
    _write(sys.stderr, text)


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
        self._stream.write("\n".join(map(plain, self._decode(bytes(data)).split("\n"))))
        return len(data)


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


def number(value: float) -> str:
    """Format a statistic: whole numbers in full, others with 6 digits, NaN (no data) as `-`."""
    if math.isnan(value):
        return UNOBSERVED
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.6g}"


def size(n_bytes: float) -> str:
    """Format a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


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
