"""A run, read-only: live, sealed, or crashed; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpprobe import destination, inside, layout
from ddpprobe.detectors.settings import Settings
from ddpprobe.detectors.suite import order_of_cause
from ddpprobe.layout import RunDir
from ddpprobe.records import STATS, Anomaly, StepRecord
from ddpprobe.replay.cache import CopyError, url_of
from ddpprobe.replay.captured_steps import (
    CapturedStep,
    captured_attempts,
    captured_step,
    captured_steps,
    damage_of_expiry,
)
from ddpprobe.replay.completeness import Completeness, completeness
from ddpprobe.replay.copies import copy_of, fetch_captured
from ddpprobe.replay.endings import Death, Ending, deaths_of, ending_of
from ddpprobe.replay.expired import expired_in
from ddpprobe.replay.not_a_run import WHERE, what_is_there
from ddpprobe.replay.overlay import Overlay
from ddpprobe.replay.readings import Reading, read_readings
from ddpprobe.replay.series import Scalars, Series, read_scalars, read_series
from ddpprobe.replay.summary import summarize
from ddpprobe.replay.tensors import Capsule, Captured, GlobalTensor
from ddpprobe.replay.under_way import is_under_way
from ddpprobe.replay.verdicts import judged, losses, verdicts
from ddpprobe.store.manifest import Lost

if TYPE_CHECKING:
    import xarray


LOOKS = 3  # at a run that seems to be incomplete, until two of them agree


class RunError(Exception):
    """A path that cannot be opened as a run; the text is one line and says what to do.

    Attributes:
        exit_code: for the command line: 2 wrong use, 3 damaged.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Run:
    """A run directory, read-only: what is in the store, and what only the journals hold yet.

    Every call looks at the directory anew, so a live run can be asked again and again.

    Args:
        path: the run directory; see `open_run`, which says what is wrong with a path.
        identity: content of its run.json.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self._identity = identity
        self._overlay = Overlay(RunDir(path))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self._identity.get("name") or self.path.name)

    @property
    def lost(self) -> list[Lost]:
        """What calls so far found damaged or missing; `ddpprobe.replay.verify` looks everywhere."""
        return self._overlay.lost

    def attempts(self) -> list[int]:
        """Numbers of the starts of this run, ascending."""
        return self._overlay.attempts()

    def ranks(self, attempt: int | None = None) -> list[int]:
        """Ranks that left records in an attempt (default: the last one)."""
        attempts = self._overlay.attempts()
        return self._overlay.ranks(attempts[-1] if attempt is None else attempt) if attempts else []

    def info(self) -> dict[str, Any]:
        """Return what ran, as plain values that JSON can hold.

        Keys: `path`, `name`, what run.json says (`run_id`, `world_size`, `nodes`, `wrapper`,
        `backend`, `torch`, `every`, `hostname`, `created_ns`, `destination`, `format_version`),
        `uploads` (not complete: `node`, `error`, `finish`: what to type), `state` of the newest
        attempt (running, ended, stopped, crashed, hung, vanished or unknown) and `end` (how it came
        to that: `ends.judge.End` as values; `attempts` have theirs), `unsealed` (the nodes that
        an ended run's store lacks something of, without a daemon: `node`, `finish`: what to type),
        `steps` {first, last},
        `complete` (every sampled step of every rank is held, and every end is known) and `unknown`
        (else: texts), `pace` (under a budget: `every` from `step` on, `budget`, and the `ratio`
        expected then),
        `sites` (number), `bytes` {store, manifest, journal, total},
        `anomalies` {page, warn, info}, `first_death`, `lost` (texts), and `attempts`: for each
        `attempt`, `steps`, `pace`, `sites`, `first_death`, `sealed`, `unsealed` (nodes),
        `torn_bytes`, `silent_ranks`, `orders` (`told_orders.orders_of`) and `ranks`: `rank`,
        `local_rank`, `node`, `hostname`, `device`, `pid`, `status`,
        `first_step`, `last_step`, `sampled`, `expected` (steps that it sampled, or another rank),
        `completeness`, and of its last sampled step `sites_expected`, `sites_observed`,
        `unsupported` {what was skipped: tensors} and `silent` (the first modules that were selected
        and never called); `dropped` {reason: how often} is what it said it lost, `steady` the sites
        whose infinities it knows to do no harm: `site`, `values` ("+Inf", "-Inf"), `step`.
        """
        told = summarize(
            self._overlay, self._identity, self.anomalies(), self.completeness(), self.endings()
        )
        url = url_of(self.path)
        return told if url is None else {**told, "path": url}

    def records(
        self, rank: int | None = None, attempt: int | None = None, *, after: int = -1
    ) -> Iterator[StepRecord]:
        """Yield step records, ascending within each attempt.

        Args:
            rank: one rank's own; None: all ranks merged.
            attempt: of one attempt; None: of all, one after the other.
            after: of steps above this one only.
        """
        for number in self._attempts(attempt):
            if rank is None:
                yield from self._overlay.merged_records(number, after)
            else:
                yield from self._overlay.rank_records(number, rank, after)

    def readings(self, attempt: int | None = None) -> Iterator[Reading]:
        """Yield what the daemons read of their hosts and of the ranks' processes, node by node."""
        for number in self._attempts(attempt):
            yield from read_readings(self._overlay, number)

    def anomalies(self) -> list[Anomaly]:
        """Return what went wrong in order of cause, each first cause before what followed from it.

        What the daemon found is always among it, as it was recorded; if the daemon did not see all
        there is, so is what the detectors make of the records that are held. Dead ranks are added.
        Nothing is called a first cause where other nodes' ranks are missing: see `completeness`.
        """
        overlay = self._overlay
        return order_of_cause([a for n in overlay.attempts() for a in verdicts(overlay, n)])

    def completeness(self) -> Completeness:
        """Return how much of the run is held: what `anomalies` and all else here is about."""
        host = str(self._identity.get("hostname") or "")
        overlay = self._overlay
        found = completeness(overlay, live=is_under_way(overlay), host=host)
        for _ in range(LOOKS if not found.complete else 0):
            # A record may be on its way from a journal to the store, and a rank may say goodbye.
            anew = Overlay(overlay.run)
            again = completeness(anew, live=is_under_way(anew), host=host)
            if again == found:
                break
            found = again
        return found

    def replayed(
        self, settings: Settings | None = None, advance: Callable[[int], None] = lambda _: None
    ) -> list[Anomaly]:
        """Return what the detectors make of the records with other settings, as `anomalies` does.

        Args:
            settings: by detector, what is not to be as by default; see `suite.read_settings`.
            advance: told 1 for each record that was read.
        """
        found: list[Anomaly] = []
        for attempt in self._overlay.attempts():
            here = judged(self._overlay, attempt, settings, advance)
            found += here + losses(self._overlay, attempt, here)
        return order_of_cause(found)

    def deaths(self) -> list[Death]:
        """Return the ranks that ended badly, by attempt, the cause first where it is known."""
        return [death for ending in self.endings() for death in deaths_of(ending)]

    def endings(self) -> list[Ending]:
        """Return how each attempt ended, ascending; `end.state` is what `info` calls its state."""
        return [ending_of(self._overlay, attempt) for attempt in self._overlay.attempts()]

    def series(
        self,
        site_glob: str,
        stat: str,
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> Series:
        """Return one statistic of the matching sites over the sampled steps.

        Args:
            site_glob: over `fqn:kind`, or `fqn` for every kind; `*` and `?` as in file names.
            stat: one of `records.STATS`.
            rank: one rank's own rows; None: all ranks merged.
            steps: slice over step numbers.
            attempt: None: all of them.

        Raises:
            ValueError: `stat` is none.
        """
        if stat not in STATS:
            msg = f"unknown statistic {stat!r}: choose one of {', '.join(STATS)}"
            raise ValueError(msg)
        return read_series(self._overlay, self._attempts(attempt), site_glob, stat, rank, steps)

    def scalars(
        self,
        name: str,
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> Scalars:
        """Return one per-rank number, e.g. `loss` or `grad_norm_local`, over the steps."""
        return read_scalars(self._overlay, self._attempts(attempt), name, rank, steps)

    def to_xarray(self, rank: int | None = None, attempt: int | None = None) -> xarray.Dataset:
        """Return records as a dataset in memory, with what is not folded yet.

        Dimensions step, site, count_stat, value_stat, and for scalars rank and scalar, named as in
        the store. A large run is better opened lazily: `xarray.open_zarr(RUN/run.zarr, group=...)`.

        Args:
            rank: one rank's own; None: all ranks merged.
            attempt: default: the last one.

        Raises:
            ImportError: xarray is not installed.
        """
        try:
            from ddpprobe.replay.dataset import to_dataset  # noqa: PLC0415
        except ModuleNotFoundError as error:
            msg = "Run.to_xarray() needs xarray: pip install 'ddpprobe[xarray]'"
            raise ImportError(msg) from error
        attempts = self._overlay.attempts()
        chosen = attempts[-1] if attempt is None and attempts else attempt
        return to_dataset(list(self.records(rank, chosen)))

    def captures(self, attempt: int | None = None) -> list[Captured]:
        """Return the steps of which full tensors were kept (of all attempts), ascending."""
        self._lose_expiry(attempt)
        steps = [s for n in self._captured(attempt) for s in captured_steps(self._overlay.run, n)]
        self._overlay.lose(*(lost for step in steps for lost in step.lost))
        return [step.describe() for step in steps if step.event is not None]

    def tensor(
        self, site: str, step: int, attempt: int | None = None, micro: int = 0, call: int = 0
    ) -> GlobalTensor:
        """Return a captured tensor of all ranks; its bytes are read when it is indexed.

        Args:
            site: `fqn:kind`, e.g. `layers.0.attn:output`, `layers.0.attn.q.weight:grad`; a tensor
                inside a structured value as `layers.0.attn:output[0]`.
            step: a captured one.
            attempt: default: the last one that captured the step.
            micro: which micro-batch, from 0.
            call: which call of the module in it, from 0.

        Raises:
            TensorError: it was not captured, or has expired; the text says what is there.
        """
        found = self._captured_step(step, attempt)
        return found.tensor(found.find(site, micro, call))

    def capsules(self, step: int, module: str, attempt: int | None = None) -> list[Capsule]:
        """Return what each rank kept of each call of a module at a step, by rank.

        Raises:
            TensorError: the step was not captured, or has expired.
        """
        return self._captured_step(step, attempt).capsules(module)

    def expired(self) -> list[Lost]:
        """Return what retention took away (`max_bytes`, `max_age`): it is gone, not damaged."""
        self._lose_expiry(None)
        return expired_in(self._overlay)

    def _lose_expiry(self, attempt: int | None) -> None:
        run = self._overlay.run
        for number in self._captured(attempt):
            self._overlay.lose(*damage_of_expiry(run, number))

    def _captured(self, attempt: int | None) -> list[int]:
        run = self._overlay.run
        return captured_attempts(run, self.attempts()) if attempt is None else [attempt]

    def _captured_step(self, step: int, attempt: int | None) -> CapturedStep:
        fetch_captured(self.path, step)
        self._lose_expiry(attempt)
        found = captured_step(self._overlay.run, self._captured(attempt), step)
        self._overlay.lose(*found.lost)
        return found

    def _attempts(self, attempt: int | None) -> list[int]:
        return self._overlay.attempts() if attempt is None else [attempt]


def open_run(path: str | Path, advance: Callable[[int], None] = lambda _: None) -> Run:
    """Open a run for reading: live, sealed or crashed.

    Args:
        path: the run directory, or the URL of an object store that it was uploaded to: then what
            is new there is fetched into a copy in `~/.cache/ddpprobe` first.
        advance: told 1 for each file that is fetched.

    Raises:
        RunError: it is no run directory, or of a version that is not read; the text says what to
            do.
    """
    try:
        directory = copy_of(str(path), advance) if destination.is_url(path) else Path(path)
    except CopyError as error:
        raise RunError(str(error)) from error
    if not directory.exists():
        raise RunError(f"{path}: no such directory; give the one install() made, {WHERE}")
    if not directory.is_dir():
        raise RunError(f"{path}: a file; give the run directory that holds it, {WHERE}")
    identity = _identity(directory)
    if identity and (why := layout.unreadable(identity["format_version"])):
        raise RunError(f"{path}: {why}")
    return Run(directory, identity)


def _identity(directory: Path) -> dict[str, Any]:
    run = RunDir(directory)
    try:
        data = inside.read_regular(directory, layout.RUN_JSON)
    except FileNotFoundError:
        if not run.attempts() and not (run.path / "manifest").is_dir():
            raise RunError(what_is_there(directory)) from None
        return {}  # it was killed while it started, or run.json was lost: the rest is still there
    except OSError as error:
        raise RunError(f"{run.run_json}: cannot be read ({error.strerror})") from error
    try:
        found = inside.parse(data)
    except ValueError:
        found = None
    version = found.get("format_version") if isinstance(found, dict) else None
    if not isinstance(found, dict) or type(version) is not int:
        raise RunError(
            f"{run.run_json}: half written or damaged ({len(data)} bytes, format_version "
            f"{version!r:.40}); move it away to open what the journals and the store still hold",
            exit_code=3,
        )
    return found
