"""The overview that the head's daemon leaves in a sealed run, made a block of steps at a time."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpprobe.daemon.uploader import identity_of
from ddpprobe.detectors.suite import order_of_cause
from ddpprobe.ends.anomalies import last_words
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.paths import RunDir

WRITER = "ddpprobe.store.overview_writer"
LOOK_SECONDS = 0.05

logger = logging.getLogger("ddpprobe")


class OverviewJob:
    """Writes `overview.parquet` beside the store.

    Without pyarrow there is none: a run needs nothing of it.

    Args:
        run: the run directory, sealed.
        attempt: number of its newest attempt.
        state: says how that ended; asked when the file is written.
        fuse: contains what is wrong with ourselves.
    """

    def __init__(self, run: RunDir, attempt: int, state: Callable[[], str], fuse: Fuse) -> None:
        self.done = False
        self._run, self._attempt, self._state = run, attempt, state
        self._work = self._steps()
        self._next = fuse.guard(self._advance)

    def advance(self) -> None:
        """Do a little of what is left."""
        self.done = self.done or not self._next()

    def _advance(self) -> bool:
        """Return whether there is more to do."""
        try:
            next(self._work)
        except StopIteration:
            return False
        except OSError as error:  # a full disk: `ddpprobe export` makes it again
            logger.warning("ddpprobe: the overview cannot be written: %s", error)
            return False
        return True

    def _steps(self) -> Iterator[None]:
        if find_spec("pyarrow") is None:
            logger.info("ddpprobe: no overview.parquet: pip install 'ddpprobe[parquet]'")
            return
        # Not at the top: zarr takes half a second.
        from ddpprobe.store.overview import Overview, facts_of  # noqa: PLC0415
        from ddpprobe.store.overview_file import (  # noqa: PLC0415
            NAME,
            noted_config,
            read_overview,
            stored_identity,
            stored_metas,
        )

        overview = Overview()
        yield from read_overview(self._run, overview)
        metas: list[dict[str, Any]] = []
        for meta in stored_metas(self._run, self._attempt):
            metas.append(meta)
            yield
        facts: dict[str, Any] = facts_of(
            stored_identity(self._run, identity_of(self._run), self._attempt, metas),
            noted_config(self._run), state=self._state(), attempt=self._attempt,
            found=self._found(),
        )  # fmt: skip
        yield from _write(overview.rows(facts), self._run.path / NAME)

    def _found(self) -> list[Any]:
        from ddpprobe.store.format import attempt_key  # noqa: PLC0415
        from ddpprobe.store.reader import StoredGroup  # noqa: PLC0415

        group = StoredGroup(self._run, f"{attempt_key(self._attempt)}/anomalies")
        return order_of_cause(last_words(group.anomalies())) if group.exists else []


def _write(rows: Mapping[str, Sequence[Any]], path: Path) -> Iterator[None]:
    """Have a process of its own write the file: pyarrow would make the daemon twice as large."""
    with tempfile.TemporaryFile("w+") as said:
        json.dump(rows, said, default=lambda number: number.item())  # NumPy's
        said.seek(0)
        process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            [sys.executable, "-m", WRITER, str(path)], stdin=said, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    with process:
        while True:
            try:
                code = process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                yield
                continue
            break
        if code and process.stderr is not None:
            last = process.stderr.read().strip().rpartition("\n")[2]
            raise OSError(last or f"its writer ended with {code}")
