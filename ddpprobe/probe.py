"""`ddpprobe.install(model)` and the `Probe` it returns: the one object a script holds."""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import math
import os
import sys
import textwrap
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, final

from torch import Tensor, nn
from torch import distributed as dist

from ddpprobe import rendezvous, torch_private
from ddpprobe.enlist import Enlisted, Wishes, enlist
from ddpprobe.fuse import Fuse
from ddpprobe.pacing import Pacer
from ddpprobe.recorder import Recorder
from ddpprobe.sampling import Schedule, as_schedule
from ddpprobe.shipping import Identity
from ddpprobe.stats import native
from ddpprobe.topology import stages
from ddpprobe.topology.describe import Topology, describe

_BACKWARD = ("output", "full")
_DAEMON = ("auto", "none")
_live: set[Probe] = set()  # held here, since a script may drop what install() returned
_probed: weakref.WeakKeyDictionary[nn.Module, Probe] = weakref.WeakKeyDictionary()
_installs = 0


@final
class Probe:
    """A running observation. Nothing it does raises into training; `close()` ends it.

    Attributes:
        run_dir: the run directory; None if ddpprobe is switched off by `DDPPROBE_DISABLE=1`.
        run_id: identity of the run, the same on all ranks.
    """

    def __init__(self, recorder: Recorder | None, enlisted: Enlisted | None) -> None:
        self._recorder = recorder
        self._enlisted = enlisted
        self._fuse = Fuse("probe")
        self.run_dir: str | None = str(enlisted.run.path) if enlisted else None
        self.run_id: str | None = enlisted.run_id if enlisted else None

    def log(self, **values: float | Tensor) -> None:
        """Keep named numbers with the current step, such as `probe.log(loss=loss)`.

        Tensors must have one element; they stay on their device until the step is shipped.
        Steps that are not sampled keep nothing.
        """
        if self._recorder is not None:
            self._fuse.guard(self._recorder.log)(values)

    def step(self) -> None:
        """End an optimizer step: only for loops without a `torch.optim` optimizer."""
        if self._recorder is not None:
            self._fuse.guard(self._recorder.declare_step)()

    @contextlib.contextmanager
    def pause(self, reason: str = "") -> Iterator[None]:
        """Within this block nothing is a training step, a hang, or a straggler."""
        if self._recorder is not None:
            self._fuse.guard(self._recorder.pause)(reason)
        try:
            yield
        finally:
            if self._recorder is not None:
                self._fuse.guard(self._recorder.resume)()

    def close(self) -> None:
        """Write what is left and take every hook, file handle and lock away. Idempotent."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        status = "exception" if hasattr(sys, "last_type") else "ok"
        Fuse("close").guard(recorder.close)(status)
        if self._enlisted is not None and self._enlisted.lock is not None:
            self._enlisted.lock.release()
        _live.discard(self)
        for root in [root for root, probe in _probed.items() if probe is self]:
            del _probed[root]

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _abandon(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()
        if self._enlisted is not None and self._enlisted.lock is not None:
            self._enlisted.lock.forget()


def install(
    model: nn.Module,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    every: int | Schedule = 10,
    include: str | Iterable[str] = ("*",),
    exclude: str | Iterable[str] = (),
    budget: float | None = None,
    backward: str = "output",
    name: str | None = None,
    daemon: str = "auto",
    first_step: int = 0,
) -> Probe:
    """Observe `model` from now on: the one line in a training script.

    Call it on every rank, after `init_process_group`, before or after wrapping the model.

    Args:
        model: plain, or under DistributedDataParallel, FullyShardedDataParallel (FSDP1),
            fully_shard (FSDP2, HSDP), parallelize_module (tensor parallelism) or a mixture; of a
            pipeline, this rank's stage.
        run_dir: directory of this run, created 0700; by default `ddpprobe-runs/<name>` here. A
            directory that holds a finished run gets a further attempt.
        every: sample every N-th optimizer step, or a `Schedule`.
        include: globs over module FQNs to observe; each must match something on some rank.
        exclude: globs over module FQNs to leave out; each must match something on some rank.
        budget: what ddpprobe may add to a step, as a share of the step's own time, on average: 0.01
            keeps it under 1 % by sampling less often than `every` says, as much as the run itself
            shows to be needed. At most every second step is sampled then (on a GPU every third);
            the warm-up and the ranges of a `Schedule` stay. None: it is measured, nothing changed.
        backward: "output" (gradients at module outputs, safe everywhere) or "full" (also
            `grad_input`, by full backward hooks on modules proven safe).
        name: of the run, for people; by default the date and time.
        daemon: "auto" starts the node daemon; "none" leaves it to you (`ddpprobe daemon`).
        first_step: number of the first optimizer step, for a resumed run.

    Environment (each overrides the argument): `DDPPROBE_DIR`, `DDPPROBE_EVERY`, `DDPPROBE_BUDGET`,
    `DDPPROBE_LISTEN`, `DDPPROBE_DISABLE=1` (returns a probe that does nothing).

    Raises:
        TypeError, ValueError: a wrong argument.
        ddpprobe.rendezvous.InstallError: some rank refused; the same text on every rank.
    """
    if os.environ.get("DDPPROBE_DISABLE") == "1":
        return Probe(None, None)
    rank, world_size, store = _job()
    wanted = _Wanted(
        model, every, _globs(include), _globs(exclude), budget, backward, daemon, first_step
    )
    enlisted = enlist(
        store, _round_name(), rank, world_size, wanted.check,
        Wishes(
            os.environ.get("DDPPROBE_DIR") or run_dir, name, daemon == "auto",
            os.environ.get("DDPPROBE_LISTEN"),
            agree=world_size > 1 and bool(budget or os.environ.get("DDPPROBE_BUDGET")),
        ),
    )  # fmt: skip
    wanted.found.cut, wanted.found.differ = enlisted.cut, enlisted.differ
    pacer = Pacer(
        wanted.schedule(), wanted.budget(), enlisted.channel, enlisted.journal, enlisted.heartbeat,
        leads=rank == 0, ahead=wanted.found.device.type != "cpu",
    )  # fmt: skip
    recorder = Recorder(
        wanted.found, Identity(rank, world_size, enlisted.attempt), pacer,
        wanted.select, enlisted.journal, enlisted.heartbeat, full_backward=backward == "full",
        first_step=first_step, after_step=enlisted.keep_daemon,
    )  # fmt: skip
    if wanted.found.device.type == "cpu":
        native.prepare()  # here, where waiting is allowed: no step ever compiles anything
    recorder.start()
    probe = Probe(recorder, enlisted)
    _probed[wanted.found.root] = probe
    _live.add(probe)
    return probe


def _job() -> tuple[int, int, rendezvous.Store]:
    if dist.is_available() and dist.is_initialized():
        store = torch_private.default_store()
        if store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]  # not in its __all__
        return dist.get_rank(), dist.get_world_size(), store
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise rendezvous.InstallError(
            f"WORLD_SIZE is {world_size}, but there is no process group to agree through. "
            "Call torch.distributed.init_process_group() before ddpprobe.install(model)."
        )
    return 0, 1, dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__


def _round_name() -> str:
    """Name this install in the store: the same on all ranks, new for each call and restart."""
    global _installs  # noqa: PLW0603  (the count of calls is what all ranks have in common)
    _installs += 1
    return f"ddpprobe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_installs}"


@final
class _Wanted:
    """What `install()` was called with here; `check` runs where an error reaches all ranks."""

    def __init__(
        self, model: object, every: int | Schedule, include: tuple[str, ...],
        exclude: tuple[str, ...], budget: float | None, backward: str, daemon: str,
        first_step: int,
    ) -> None:  # fmt: skip
        self._model = model
        self._every = every
        self._include = include
        self._exclude = exclude
        self._budget = budget
        self._backward = backward
        self._daemon = daemon
        self._first_step = first_step
        self._chosen: dict[str, bool] = {}
        self.found: Topology  # by `check`

    def check(self) -> dict[str, Any]:
        """Return this rank's part of the plan.

        Raises:
            ValueError: a wrong argument.
        """
        if not isinstance(self._model, nn.Module):
            raise ValueError(  # noqa: TRY004  (told to all ranks alike)
                f"install() takes a torch.nn.Module, got {type(self._model).__name__}. "
                "Write ddpprobe.install(model)."
            )
        schedule, budget = self.schedule(), self.budget()
        for option, value, allowed in (
            ("backward", self._backward, _BACKWARD), ("daemon", self._daemon, _DAEMON),
        ):  # fmt: skip
            if value not in allowed:
                raise ValueError(f"{option} must be one of {allowed}, got {value!r}")
        step = self._first_step
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"first_step must be a step number, 0 or more, got {step!r}")
        found = self.found = describe(self._model, self.select)
        owner = _probed.get(found.root)
        if owner is not None and owner in _live:
            raise ValueError(
                f"this {type(found.root).__name__} already has a probe (run {owner.run_dir}). "
                "Call probe.close() before installing another."
            )
        settings = [schedule.fingerprint(), self._include, self._exclude, self._backward, step]
        return {
            "settings": [*settings, budget], "every": schedule.every, "wrapper": found.wrapper,
            "device": str(found.device), "unmatched": self._unmatched(found),
            "parts": stages.parts(found),
        }  # fmt: skip

    def schedule(self) -> Schedule:
        """Return the schedule; `DDPPROBE_EVERY` overrides the argument."""
        text = os.environ.get("DDPPROBE_EVERY")
        if text is None:
            return as_schedule(self._every)
        if not text.isdecimal():
            raise ValueError(f"DDPPROBE_EVERY must be a whole number of steps, got {text!r}")
        return as_schedule(int(text))

    def budget(self) -> float | None:
        """Return the budget; `DDPPROBE_BUDGET` overrides the argument."""
        text = os.environ.get("DDPPROBE_BUDGET")
        try:
            budget = self._budget if text is None else float(text)
        except ValueError:
            budget = math.nan
        number = isinstance(budget, float) and 0 < budget < 1
        if budget is not None and not number:
            came = repr(self._budget) if text is None else f"DDPPROBE_BUDGET={text}"
            raise ValueError(
                "budget must be a share of the step time, between 0 and 1 (0.01: sampling may add "
                f"1 %), or None; got {came}"
            )
        return budget

    def select(self, fqn: str) -> bool:
        """Whether the module `fqn` is observed."""
        if fqn not in self._chosen:
            self._chosen[fqn] = _matches(fqn, self._include) and not _matches(fqn, self._exclude)
        return self._chosen[fqn]

    def _unmatched(self, found: Topology) -> dict[str, str]:
        """Globs that match nothing here, with what to say if they match nothing on any rank."""
        names = [fqn for fqn, _ in found.named_modules()]
        some = textwrap.shorten(", ".join(filter(None, names)), 200, placeholder=" ...")
        return {
            f"{option} {glob}": f"{option} glob {glob!r} matches no module. There are: {some}"
            for option, globs in (("include", self._include), ("exclude", self._exclude))
            for glob in globs
            if not any(_matches(name, (glob,)) for name in names)
        }


def _globs(globs: str | Iterable[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)


def _matches(fqn: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, glob) for glob in globs)


def _close_all() -> None:
    for probe in list(_live):
        probe.close()


def _abandon_all() -> None:
    for probe in list(_live):
        probe._abandon()  # noqa: SLF001  (same module)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)

__all__ = ["Probe", "install"]
