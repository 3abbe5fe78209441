"""What users ask of the head's daemon while a run goes on: by `probe.trigger`, by the command line.

A command line writes one small JSON file into `RunDir.requests`; the daemon writes its answer
beside it. Both survive the daemon, whose successor finds them, and whom it has answered.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ddpprobe.records.events import TriggerEvent, Wish
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.validate import MALFORMED, int64

CAPTURE_STEPS = 2  # that a capture takes unless somebody says more
MAX_BYTES = 64 << 10  # of one request
MAX_GLOBS = 64
SCRIPT = "trigger/"  # how the cause of a script's wish begins
MAX_REASON = 1000  # characters of what another node passes on; a rank keeps 200
_OF_RANK = re.compile(rf"{SCRIPT}(0|[1-9]\d{{0,8}})/(0|[1-9]\d{{0,8}})", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class Request:
    """A wish for a capture.

    Attributes:
        attempt: of the run.
        cause: identity, so that it is followed once.
        reason: for people.
        globs: over module FQNs; none: those under suspicion.
        steps: how many.
        step: of the script when it asked.
    """

    attempt: int
    cause: str
    reason: str
    globs: tuple[str, ...] = ()
    steps: int = CAPTURE_STEPS
    step: int = 0

    @property
    def of_script(self) -> bool:
        """Whether a training script asks, and not somebody at a terminal."""
        return self.cause.startswith(SCRIPT)

    @property
    def rank(self) -> int:
        """The rank whose script asks, -1 for somebody at a terminal."""
        found = _OF_RANK.fullmatch(self.cause)
        return int(found[1]) if found else -1

    @classmethod
    def of_rank(cls, attempt: int, rank: int, asked: TriggerEvent) -> Request:
        """Return what a rank's journal says that its user asked for."""
        cause = f"{SCRIPT}{rank}/{asked.number}"
        return cls(attempt, cause, f"trigger: {asked.reason}", step=asked.step)

    @classmethod
    def of_node(cls, wish: Wish) -> Request:
        """Return what another node passed on.

        Raises:
            ValueError: it is no script's wish.
        """
        # Only a script's: the answer to another one would go to a file of that name.
        if _OF_RANK.fullmatch(wish.cause) is None or len(wish.reason) > MAX_REASON:
            raise ValueError(f"a wish of nobody's: {wish.cause!r:.100}")
        return cls(wish.attempt, wish.cause, wish.reason, step=wish.step)

    def wish(self) -> Wish:
        """Return what `of_node` takes."""
        return Wish(self.attempt, self.cause, self.reason, self.step)


@final
class RequestFiles:
    """Where command lines leave their requests; nothing of it raises.

    Args:
        directory: made by the first of them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: set[str] = set()

    def collect(self, attempt: int) -> list[Request]:
        """Return the requests that were not returned before."""
        try:
            names = sorted(os.listdir(self._directory))
        except OSError:
            return []
        new = [n for n in names if n.endswith(".json") and n[0] != "." and n not in self._seen]
        self._seen.update(new)
        return [request for name in new if (request := self._read(name, attempt)) is not None]

    def answer(self, cause: str, answer: Mapping[str, Any]) -> None:
        """Answer a request, if it came through these files."""
        sort, _, name = cause.partition("/")
        if sort == "request":
            with contextlib.suppress(OSError):
                paths.write_json(self._directory / f"{name}.answer", answer)
                (self._directory / f"{name}.json").unlink(missing_ok=True)

    def _read(self, name: str, attempt: int) -> Request | None:
        cause = f"request/{name.removesuffix('.json')}"
        try:
            fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                value = safe_read.parse(file.read(MAX_BYTES))
            globs = tuple(str(glob) for glob in value["modules"])
            if len(globs) > MAX_GLOBS:
                refused = f"it names {len(globs)} globs, {MAX_GLOBS} are the most"
                self.answer(cause, {"refused": refused})
                return None
            return Request(
                attempt, cause, f"trigger: {value['reason']}", globs, int64(value["steps"])
            )
        except (OSError, *MALFORMED):
            self.answer(cause, {"refused": "the request cannot be read"})
            return None
