"""`ddpprobe.install(model)` and the `Probe` it returns: the one object a script holds."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import final

from torch import Tensor, nn
from torch import distributed as dist

from ddpprobe import rendezvous, torch_private
from ddpprobe.arguments import Arguments
from ddpprobe.ends import last_words
from ddpprobe.enlist import Enlisted, Wishes, enlist
from ddpprobe.fuse import Fuse
from ddpprobe.hooks.capturing import Capturing
from ddpprobe.hooks.desk import Desk
from ddpprobe.hooks.stream_capture import is_captured
from ddpprobe.pacing import Pacer
from ddpprobe.recorder import Recorder
from ddpprobe.records import Anomaly
from ddpprobe.responder import Responder
from ddpprobe.sampling import Schedule
from ddpprobe.shipping import Identity
from ddpprobe.stats import native
from ddpprobe.stats.warm_up import warm_up

_live: set[Probe] = set()  # held here, since a script may drop what install() returned
_probed: weakref.WeakKeyDictionary[nn.Module, Probe] = weakref.WeakKeyDictionary()
_installs = 0


@final
class Probe:
    """A running observation; `close()` ends it.

    Nothing it does raises into training but what the user has asked for by `on_anomaly`.

    Attributes:
        run_dir: the run directory; None if ddpprobe is switched off by `DDPPROBE_DISABLE=1`.
        run_id: identity of the run, the same on all ranks.
    """

    def __init__(
        self, recorder: Recorder | None, enlisted: Enlisted | None,
        responder: Responder | None = None,
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._responder = responder
        self._enlisted = enlisted
        self._fuse = Fuse("probe")
        self.run_dir: str | None = str(enlisted.run.path) if enlisted else None
        self.run_id: str | None = enlisted.run_id if enlisted else None

    def log(
        self, *, indices: Tensor | Sequence[int] | None = None, **values: float | Tensor
    ) -> None:
        """Keep named numbers with the current step, such as `probe.log(loss=loss)`.

        Tensors must have one element; they stay on their device until the step is shipped.
        Steps that are not sampled keep nothing.

        Args:
            indices: of the samples in the micro-batch whose forward was last, whole numbers; kept
                with the tensors of a captured step, so that a bad batch can be found again.
            values: numbers by name.
        """
        if self._recorder is not None and not is_captured():
            if indices is not None:
                self._recorder.capturing.log_samples(indices)
            self._fuse.guard(self._recorder.log)(values)

    def step(self) -> None:
        """End an optimizer step: only for loops without a `torch.optim` optimizer."""
        if self._recorder is not None:
            self._fuse.guard(self._recorder.declare_step)()
        if self._responder is not None:
            self._responder.act()

    def trigger(self, reason: str = "asked for") -> None:
        """Ask for a capture, as an anomaly would: of the next steps, the same on all ranks.

        The window before it is kept, too. One rank is enough; it returns at once. The head's daemon
        announces the steps, if there is one.
        """
        if self._recorder is not None and self._responder is not None:
            self._fuse.guard(self._responder.ask)(str(reason))

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
        self._close(at_exit=False)

    def _close(self, *, at_exit: bool) -> None:
        recorder, self._recorder, self._responder = self._recorder, None, None
        if recorder is None:
            return
        words = Fuse("last words").guard(last_words.goodbye)(at_exit=at_exit)
        Fuse("close").guard(recorder.close)(words)
        if self._enlisted is not None:
            Fuse("close").guard(self._enlisted.writing.close)()
        if self._enlisted is not None and self._enlisted.lock is not None:
            self._enlisted.lock.release()
        _live.discard(self)
        for root in [root for root, probe in _probed.items() if probe is self]:
            del _probed[root]

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rest(self) -> None:
        if self._enlisted is not None and self._enlisted.writing.scribe is not None:
            self._enlisted.writing.scribe.rest()

    def _abandon(self) -> None:
        recorder, self._recorder, self._responder = self._recorder, None, None
        if recorder is not None:
            recorder.abandon()
        if self._enlisted is not None:
            self._enlisted.writing.abandon()
        if self._enlisted is not None and self._enlisted.lock is not None:
            self._enlisted.lock.forget()


def install(
    model: nn.Module,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    every: int | Schedule = 10,
    include: str | Iterable[str] = ("*",),
    exclude: str | Iterable[str] = (),
    capture: str | Iterable[str] = (),
    on_anomaly: str | Callable[[Anomaly], object] = "record",
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
            directory that holds a finished run gets a further attempt. Or the URL of an object
            store, `s3://BUCKET/PREFIX/RUN` (gs://, az://): the run is in `ddpprobe-runs/RUN` here
            and the daemon uploads it while it goes on; needs `pip install 'ddpprobe[cloud]'`.
        every: sample every N-th optimizer step, or a `Schedule`.
        include: globs over module FQNs to observe; each must match something on some rank.
        exclude: globs over module FQNs to leave out; each must match something on some rank.
        capture: globs over FQNs of modules whose full tensors are kept on every sampled step:
            inputs, outputs, their gradients, parameters, buffers, and what else a module needs to
            be called again. Each must match something on some rank.
        on_anomaly: what happens at an anomaly of level page, beside what is recorded and captured:
            "record": nothing. "stop": every rank raises `ddpprobe.AnomalyStop` out of its
            `optimizer.step()` at the same step, behind the captured ones. A function: it is called
            with the `Anomaly` on every rank at the end of the same step, and what it raises reaches
            the training loop, as it is the user's. Both need the daemon.
        budget: what ddpprobe may add to a step, as a share of the step's own time, on average: 0.01
            keeps it under 1 % by sampling less often than `every` says, as much as the run itself
            shows to be needed. At most every second step is sampled then (on a GPU every third);
            the warm-up and the ranges of a `Schedule` stay. None: it is measured, nothing changed.
        backward: "output" (gradients at module outputs, safe everywhere) or "full" (also
            `grad_input`, by full backward hooks on modules proven safe).
        name: of the run, for people; by default the date and time.
        daemon: "auto" starts the node daemon, and trains without one if it cannot be started;
            "none" leaves it to you (`ddpprobe daemon`).
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
    wanted = Arguments(
        model, every, include, exclude, capture, on_anomaly, budget, backward, daemon, first_step,
        _run_of,
    )  # fmt: skip
    enlisted = enlist(
        store, _round_name(), rank, world_size, wanted.check,
        Wishes(
            os.environ.get("DDPPROBE_DIR") or run_dir, name, daemon == "auto",
            os.environ.get("DDPPROBE_LISTEN"),
            agree=world_size > 1 and bool(budget or os.environ.get("DDPPROBE_BUDGET")),
            on_anomaly=wanted.response,
        ),
    )  # fmt: skip
    wanted.found.cut, wanted.found.differ = enlisted.cut, enlisted.differ
    journal, scribe = enlisted.writing.journal, enlisted.writing.scribe
    pacer = Pacer(
        wanted.schedule(), wanted.budget(), enlisted.channel, journal, enlisted.writing.heartbeat,
        leads=rank == 0, ahead=wanted.found.device.type != "cpu",
    )  # fmt: skip
    path = partial(enlisted.run.pack, enlisted.attempt, enlisted.node, rank)
    who = {"attempt": enlisted.attempt, "rank": rank, "world_size": world_size}
    capturing = Capturing(wanted.capture, Desk(path, who, journal, scribe), rank)
    responder = Responder(enlisted.board, pacer.add, capturing.capture, journal, on_anomaly)
    recorder = Recorder(
        wanted.found, Identity(rank, world_size, enlisted.attempt), pacer, responder, capturing,
        wanted.select, journal, enlisted.writing.heartbeat, full_backward=backward == "full",
        first_step=first_step, after_step=enlisted.after_step,
    )  # fmt: skip
    # Here, where waiting is allowed: no step ever compiles anything.
    native.prepare()
    parameters = list(wanted.found.root.parameters())
    Fuse("compiling the Triton kernels").guard(warm_up)(
        dict.fromkeys((wanted.found.device, *(p.device for p in parameters))),
        {p.dtype for p in parameters},
    )
    Fuse("starting the disk thread").guard(enlisted.start)()
    recorder.start()
    probe = Probe(recorder, enlisted, responder)
    _probed[wanted.found.root] = probe
    _live.add(probe)
    return probe


def _run_of(root: nn.Module) -> str | None:
    """Return the run directory of the living probe on `root`, None without one."""
    probe = _probed.get(root)
    return probe.run_dir if probe in _live else None


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


def _close_all() -> None:
    for probe in list(_live):
        probe._close(at_exit=True)  # noqa: SLF001  (same module)


def _rest_all() -> None:
    for probe in list(_live):
        probe._rest()  # noqa: SLF001  (same module)


def _abandon_all() -> None:
    for probe in list(_live):
        probe._abandon()  # noqa: SLF001  (same module)


atexit.register(_close_all)
os.register_at_fork(before=_rest_all, after_in_child=_abandon_all)

__all__ = ["Probe", "install"]
