"""A run, read-only: live, sealed, or crashed; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpprobe.detectors.suite import chosen, order_of_cause
from ddpprobe.errors import RunError, RunNotFound, TensorError, UnknownSeries
from ddpprobe.reader.captured_steps import (
    CapturedStep,
    captured_attempts,
    captured_step,
    captured_steps,
    damage_of_expiry,
)
from ddpprobe.reader.completeness import Completeness, completeness
from ddpprobe.reader.endings import Death, Ending, deaths_of, ending_of
from ddpprobe.reader.expired import expired_in, expired_of
from ddpprobe.reader.identity import RunIdentity, identity_of
from ddpprobe.reader.listed_run import listed
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.readings import NodeReading, read_readings
from ddpprobe.reader.run_directories import newest
from ddpprobe.reader.run_html import html_of
from ddpprobe.reader.run_numbers import RunNumbers
from ddpprobe.reader.selection import check_attempt, check_step, check_text, is_whole, told_as
from ddpprobe.reader.summary import summarize
from ddpprobe.reader.tensors import Captured, GlobalTensor, StoredCall
from ddpprobe.reader.under_way import is_under_way
from ddpprobe.reader.verdicts import losses, run_detectors, verdicts
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir import store_url
from ddpprobe.rundir.not_a_run import GIVE, WHERE, as_directory
from ddpprobe.store.manifest import Lost
from ddpprobe.store.remote.cache import url_of
from ddpprobe.store.remote.cached_run import copy_of, fetch_captured

if TYPE_CHECKING:
    pass


LOOKS = 3  # at a run that seems to be incomplete, until two of them agree


class Run(RunNumbers):
    """A run directory, read-only: what is in the store, and what only the journals hold yet.

    Every call looks at the directory anew, so a live run can be asked again and again.

    Args:
        path: the run directory; see `open_run`, which says what is wrong with a path.
        identity: content of its run.json, or what is known of it.
    """

    def __init__(self, path: Path, identity: RunIdentity) -> None:
        super().__init__(path)
        self._identity, self._identity_lost = identity.told, identity.lost

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the line of `ddpprobe ls` as a small table."""
        return html_of(listed(self.path), url_of(self.path) or str(self.path))

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self._identity.get("name") or self.path.name)

    @property
    def where(self) -> str:
        """What to type to open it from anywhere: its URL, or its absolute directory."""
        return url_of(self.path) or str(self.path.absolute())

    @property
    def identity(self) -> dict[str, Any]:
        """What run.json says; without one what the store or the ranks say, {} if none does."""
        return dict(self._identity)

    @property
    def identity_lost(self) -> str:
        """That run.json is missing, and what is therefore not known; "" if it is there."""
        return self._identity_lost

    @property
    def lost(self) -> list[Lost]:
        """What calls so far found damaged or missing; `verify` looks everywhere."""
        return self._merged_reader.lost

    @property
    def process(self) -> str:
        """What it has in common with runs of the same process's other models; "": not known."""
        attempts = self.attempts()
        told = self._merged_reader.rank_meta(attempts[-1]).get("process") if attempts else None
        return told if isinstance(told, str) else ""

    def attempts(self) -> list[int]:
        """Numbers of the starts of this run, ascending."""
        return self._merged_reader.attempts()

    def ranks(self, attempt: int | None = None) -> list[int]:
        """Ranks that left records in an attempt (default: the last one).

        Raises:
            UnknownSeries: there is no such attempt, although there are others.
        """
        attempts = self._attempts(attempt)
        return self._merged_reader.ranks(attempts[-1]) if attempts else []

    def has_rank(self, rank: int, attempt: int) -> bool:
        """Return whether a rank left records in an attempt; cheaper than to look in `ranks`."""
        return is_whole(rank) and is_whole(attempt) and self._merged_reader.has_rank(attempt, rank)

    def sampled_steps(self, attempt: int, rank: int | None = None) -> list[int]:
        """Return the sampled steps of an attempt that are held of a rank (None: of any).

        Raises:
            UnknownSeries: there is no such attempt or rank, although there are others.
        """
        self._asked(rank, attempt)
        ranks = self._merged_reader.ranks(attempt) if rank is None else [rank]
        found = [self._merged_reader.rank_steps(attempt, r) for r in ranks]
        merged = [] if rank is not None else [self._merged_reader.told_steps(attempt)]
        return sorted({n for steps, flags in (*found, *merged) for n in steps[flags].tolist()})

    def info(self) -> dict[str, Any]:
        """Return what ran, as plain values that JSON can hold.

        Keys: `path`, `name`, what run.json says (`run_id`, `world_size`, `nodes`, `wrapper`,
        `backend`, `torch`, `every`, `hostname`, `created_ns`, `destination`, `format_version`),
        `uploads` (not complete: `node`, `error`, `finish`: what to type), `state` of the newest
        attempt (running, ended, stopped, crashed, hung, vanished or unknown) and `end` (how it came
        to that: `ends.end.End` as values; `attempts` have theirs), `unsealed` (the nodes that
        an ended run's store lacks something of, without a daemon: `node`, `finish`: what to type),
        `steps` {first, last} of the sampled ones, `began` and `reached` (the first and the last
        step that a rank trained, or is in; None: not known),
        `complete` (every sampled step of every rank is held, and every end is known) and `unknown`
        (else: texts), `pace` (under a budget: `every` from `step` on, `budget`, and the `ratio`
        expected then), `overhead` (what ddpprobe adds to a step of the newest attempt, by the
        step's own time, as it was last measured: `ratio`, and the `rank` where it is most),
        `sites` (number), `bytes` {store, manifest, journal, total},
        `anomalies` {page, warn, info}, `first_death`, `lost` (texts), `identity_lost` (that
        run.json is missing, and what is not known therefore; None if it is there), and `attempts`:
        for each `attempt`, `steps`, `began`, `reached`, `pace`, `overhead`, `sites`,
        `first_death`, `sealed`, `unsealed` (nodes), `command` (`words`, `directory`, `commit`,
        `changed`: what was typed to start it, by `records.events.CommandEvent`; None if no daemon
        saw it alive), `environment` (what its lowest rank runs on: name -> value), `unlike` (in
        what ranks differ: `name`, `values`: `value` and `ranks`, those of most ranks first),
        `changed` (in what the environment is another one than that of the attempt before: `name`,
        `before`, `now`),
        `torn_bytes`, `silent_ranks`, `orders` (`order_history.orders_of`) and `ranks`: `rank`,
        `local_rank`, `node`, `hostname`, `device`, `pid`, `status`,
        `first_step`, `last_step`, `sampled`, `expected` (steps that it sampled, or another rank),
        `completeness`, and of its last sampled step `sites_expected`, `sites_observed`,
        `unsupported` {what was skipped: tensors} and `silent` (the first modules that were selected
        and never called); `overhead_ratio` is its share of `overhead`, `dropped` {reason: how
        often} what it said it lost, `steady` the sites whose infinities it knows to do no harm:
        `site`, `values` ("+Inf", "-Inf"), `step`.
        """
        summary = summarize(
            self._merged_reader,
            self._identity,
            self.anomalies(),
            self.completeness(),
            self.endings(),
        )
        url = url_of(self.path)
        summary["identity_lost"] = self.identity_lost or None
        return summary if url is None else {**summary, "path": url}

    def readings(self, attempt: int | None = None) -> Iterator[NodeReading]:
        """Yield what the daemons read of their hosts and of the ranks' processes, node by node.

        Raises:
            UnknownSeries: there is no such attempt, although there are others.
        """
        reader = self._merged_reader
        return (r for number in self._attempts(attempt) for r in read_readings(reader, number))

    def anomalies(self) -> list[Anomaly]:
        """Return what went wrong in order of cause, each first cause before what followed from it.

        What the daemon found is always among it, as it was recorded; if the daemon did not see all
        there is, so is what the detectors make of the records that are held. Dead ranks are added.
        Nothing is called a first cause where other nodes' ranks are missing: see `completeness`.
        """
        merged_reader = self._merged_reader
        return order_of_cause(
            [a for n in merged_reader.attempts() for a in verdicts(merged_reader, n)]
        )

    def completeness(self) -> Completeness:
        """Return how much of the run is held: what `anomalies` and all else here is about."""
        host, url = str(self._identity.get("hostname") or ""), url_of(self.path) or ""
        merged_reader = self._merged_reader
        found = completeness(merged_reader, live=is_under_way(merged_reader), host=host, url=url)
        for _ in range(LOOKS if not found.complete else 0):
            # A record may be on its way from a journal to the store, and a rank may say goodbye.
            anew = MergedReader(merged_reader.run)
            again = completeness(anew, live=is_under_way(anew), host=host, url=url)
            if again == found:
                break
            found = again
        return found

    def replayed(
        self,
        settings: Mapping[str, object] | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[Anomaly]:
        """Return what the detectors make of the records with other settings, as `anomalies` does.

        Args:
            settings: by detector, what is not to be as by default, as `install(detectors=)` takes
                it: settings by name, or False for without it.
            advance: told 1 for each record that was read.

        Raises:
            RunError: there is no such detector or setting, or no such value.
        """
        if settings is not None:
            with told_as(RunError, ValueError):
                settings = chosen(settings, None)
        found: list[Anomaly] = []
        for attempt in self._merged_reader.attempts():
            here = run_detectors(self._merged_reader, attempt, settings, advance)
            found += here + losses(self._merged_reader, attempt, here)
        return order_of_cause(found)

    def deaths(self) -> list[Death]:
        """Return the ranks that ended badly, by attempt, the cause first where it is known."""
        return [death for ending in self.endings() for death in deaths_of(ending)]

    def endings(self) -> list[Ending]:
        """Return how each attempt ended, ascending; `end.state` is what `info` calls its state."""
        return [
            ending_of(self._merged_reader, attempt) for attempt in self._merged_reader.attempts()
        ]

    def captures(self, attempt: int | None = None) -> list[Captured]:
        """Return the steps of which full tensors were kept (of all attempts), ascending.

        Raises:
            TensorError: there is no such attempt, although there are others.
        """
        self._lose_expiry(attempt)
        steps = [
            s for n in self._captured(attempt) for s in captured_steps(self._merged_reader.run, n)
        ]
        self._merged_reader.lose(*(lost for step in steps for lost in step.lost))
        return [step.describe() for step in steps if step.event is not None]

    def tensor(
        self, site: str, step: int, attempt: int | None = None, micro: int = 0, call: int = 0
    ) -> GlobalTensor:
        """Return a captured tensor of all ranks; its bytes are read when it is indexed.

        Args:
            site: `fqn:kind`, e.g. `layers.0.attn:output`, `layers.0.attn.q.weight:grad`; a tensor
                inside a structured value as `layers.0.attn:output[0]` or, as statistics of it are
                printed, `layers.0.attn[0]:output`.
            step: a captured one.
            attempt: default: the last one that captured the step.
            micro: which micro-batch, from 0.
            call: which call of the module in it, from 0.

        Raises:
            TensorError: it was not captured, or has expired, or there is no such attempt; the text
                says what is there.
        """
        with told_as(TensorError, UnknownSeries):
            check_text("site", site, "layers.0.attn:output")
        found = self._captured_step(step, attempt)
        return found.tensor(found.find(site, micro, call))

    def capsules(self, step: int, module: str, attempt: int | None = None) -> list[StoredCall]:
        """Return what each rank kept of each call of a module at a step, by rank.

        Raises:
            TensorError: the step or the module was not captured, or it has expired, or there is no
                such attempt; the text says what was.
        """
        with told_as(TensorError, UnknownSeries):
            check_text("module", module, "layers.0.attn")
        return self._captured_step(step, attempt).capsules(module)

    def expired(self) -> list[Lost]:
        """Return what retention took away (`max_bytes`, `max_age`): it is gone, not damaged."""
        self._lose_expiry(None)
        return expired_in(self._merged_reader)

    def expired_steps(self, wanted: slice) -> tuple[int, int] | None:
        """Return the first and last step in a range of steps whose records expired; None: none."""
        return expired_of(self._merged_reader, wanted)

    def _lose_expiry(self, attempt: int | None) -> None:
        run = self._merged_reader.run
        for number in self._captured(attempt):
            self._merged_reader.lose(*damage_of_expiry(run, number))

    def _captured(self, attempt: int | None) -> list[int]:
        known = captured_attempts(self._merged_reader.run, self.attempts())
        with told_as(TensorError, UnknownSeries):
            check_attempt(attempt, known)
        return known if attempt is None else [attempt]

    def _captured_step(self, step: int, attempt: int | None) -> CapturedStep:
        with told_as(TensorError, UnknownSeries):
            check_step("step", step)
        fetch_captured(self.path, step)
        self._lose_expiry(attempt)
        found = captured_step(self._merged_reader.run, self._captured(attempt), step)
        self._merged_reader.lose(*found.lost)
        return found


def open_run(
    path: str | Path | None = None, advance: Callable[[int], None] = lambda _: None
) -> Run:
    """Open a run for reading: live, sealed or crashed.

    Args:
        path: the run directory, or the URL of an object store that it was uploaded to: then what
            is new there is fetched into a copy in `~/.cache/ddpprobe` first. None: the newest run
            of `$DDPPROBE_DIR`, else of `ddpprobe-runs` here, as every verb takes it.
        advance: told 1 for each file that is fetched.

    Raises:
        RunNotFound: it is no run directory, or there is no run; the text says what to give.
        RunError: it is of a version that is not read, or cannot be fetched.
    """
    if path is None:
        path = newest()
    is_url = store_url.is_url(path)
    directory = copy_of(str(path), advance) if is_url else as_directory(path, GIVE)
    if not directory.exists():
        raise RunNotFound(f"{path}: no such directory; give the one install() made, {WHERE}")
    if not directory.is_dir():
        raise RunNotFound(f"{path}: a file; give the run directory that holds it, {WHERE}")
    return Run(directory, identity_of(directory))
