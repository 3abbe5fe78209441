"""`ddpprobe.install(model)` and the `Probe` it returns: the one object a script holds."""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final, overload

from torch import Tensor, nn
from torch import distributed as dist

from ddpprobe.errors import AnomalyStop, InstallError
from ddpprobe.rank import interpreter_end, last_words, peer_watcher, process_group
from ddpprobe.rank.announcements import announce_install, tell_many
from ddpprobe.rank.first_forward import FirstForward
from ddpprobe.rank.hooks.stream_capture import is_captured
from ddpprobe.rank.join import Joined, join_run
from ddpprobe.rank.listener import Listener, must_listen
from ddpprobe.rank.made_recorder import make_recorder
from ddpprobe.rank.notes import Notes
from ddpprobe.rank.options import Checked, InstallOptions, is_disabled, options_of
from ddpprobe.rank.order_handler import OrderHandler
from ddpprobe.rank.probes import Probes, install_each
from ddpprobe.rank.quiet_fuse import QuietFuse
from ddpprobe.rank.recorder import Recorder
from ddpprobe.rank.schedule import Schedule
from ddpprobe.rank.signal_handlers import OF_THE_SCRIPT
from ddpprobe.rank.stats.warm_up import compile_kernels
from ddpprobe.rank.topology.describe import Topology, outermost
from ddpprobe.rank.topology.engine import Engine
from ddpprobe.rank.torch_private import unseen_by_modes
from ddpprobe.rank.torch_private.dynamo import run_beside_graphs
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir import switches
from ddpprobe.rundir.fuse import Fuse, logger
from ddpprobe.rundir.stopwatch import Stopwatch

_MANY = 16  # open probes, of which most may be of models that are over
_live: set[Probe] = set()  # held here, since a script may drop what install() returned
_probed: weakref.WeakKeyDictionary[nn.Module, Probe] = weakref.WeakKeyDictionary()


@final
class Probe:
    """A running observation; `close()` ends it.

    Nothing it does raises into training but what the user has asked for by `on_anomaly`.

    Attributes:
        run_dir: the run directory; None if ddpprobe is switched off by `DDPPROBE_DISABLE=1`, and
            until the first training forward where `install()` came before the process group.
        run_id: identity of the run, the same on all ranks; None like `run_dir`.
    """

    def __init__(self) -> None:
        self.run_dir: str | None = None
        self.run_id: str | None = None
        self._is_off = is_disabled()
        self._recorder: Recorder | None = None
        self._order_handler: OrderHandler | None = None
        self._joined: Joined | None = None
        self._fuse: Fuse = Fuse("probe")
        self._log: Callable[..., object] = _nothing
        self._step: Callable[..., object] = _nothing
        self._note: Callable[..., object] = _nothing
        self._notes = Notes()
        self._pauses = 0  # blocks of `pause` under way, one in another
        self._waits: FirstForward | None = None  # for a process group that may come
        self._told_close: list[Callable[[], object]] = []

    def _begin(
        self, recorder: Recorder, joined: Joined, order_handler: OrderHandler, stopwatch: Stopwatch
    ) -> None:
        """Speak for a recorder from now on."""
        self._recorder, self._joined, self._order_handler = recorder, joined, order_handler
        fuse = self._fuse = QuietFuse("probe", stopwatch=stopwatch)
        self._log, self._step = fuse.guard(recorder.log), fuse.guard(recorder.declare_step)
        self._note = fuse.guard(recorder.note)
        if self._notes.config:  # said before there was a run, or to the attempt before this one
            self._note("", self._notes.config)
        self.run_dir, self.run_id = str(joined.run.path), joined.run_id

    @run_beside_graphs
    def log(
        self, *, indices: Tensor | Sequence[int] | None = None, **values: float | Tensor
    ) -> None:
        """Keep named numbers with the current step, such as `probe.log(loss=loss)`.

        Tensors must have one element; they stay on their device until the step is shipped.
        Steps that are not sampled keep `loss` only. After `optimizer.step()` numbers belong to the
        step that is over, until the next forward of the model. What cannot be kept is told once.

        Args:
            indices: of the samples in the micro-batch whose forward was last, whole numbers; kept
                with the tensors of a captured step, so that a bad batch can be found again.
            values: numbers by name.
        """
        if self._recorder is not None and not is_captured():
            if indices is not None:
                self._recorder.capturing.log_samples(indices)
            self._log(values)

    @run_beside_graphs
    def step(self) -> None:
        """End an optimizer step: only for loops without a `torch.optim` optimizer."""
        if self._recorder is not None:
            self._step()
        if self._order_handler is not None:
            self._order_handler.act()

    def note(self, what: str = "", *, config: Mapping[str, object] | None = None) -> None:
        """Write down what a reader of the run should know; nothing waits for it.

        Args:
            what: a change of the training that is meant, such as "unfreeze", another sequence
                length, or a restart of the learning rate. Detectors take what is usual from the
                steps after it. One rank is enough.
            config: hyper-parameters by name, which `ddpprobe info` and the report show; values are
                kept as texts. Later ones replace earlier ones of the same name.
        """
        said = None if self._is_off else self._fuse.guard(self._notes.take)(what, config)
        if said is not None:
            self._note(*said)

    def listen(self, listener: Listener) -> None:
        """Have somebody in this process told of the sampled steps of this rank, and of `close()`.

        It is told inside the training loop, so what it takes is counted as ddpprobe's. There is one
        listener; another one takes its place for the steps to come.

        Raises:
            InstallError: there is no run yet (`run_dir` is None), or none any more; or this is no
                listener.
        """
        if self._is_off:
            return
        must_listen(listener)
        if self._recorder is None:
            raise InstallError("listen() needs a run: call it while this probe has a run_dir")
        fuse = Fuse("listener")
        self._recorder.listen(fuse.guard(listener.sampled))
        self._told_close = [fuse.guard(listener.closed)]

    def trigger(self, reason: str = "asked for") -> None:
        """Ask for a capture, as an anomaly would: of the next steps, the same on all ranks.

        The window before it is kept, too. One rank is enough; it returns at once. The head's daemon
        announces the steps, if there is one.
        """
        if self._recorder is not None and self._order_handler is not None:
            self._fuse.guard(self._order_handler.ask)(str(reason))

    @contextlib.contextmanager
    def pause(self, reason: str = "") -> Iterator[None]:
        """Within this block nothing is a training step, a hang, or a straggler.

        Blocks may be nested: the outermost one counts.
        """
        self._pauses += 1
        if self._pauses == 1:
            self._begin_pause(reason)
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._end_pause()

    def _begin_pause(self, reason: str) -> None:
        if self._waits is not None:
            self._waits.cancel()
        if self._recorder is not None:
            self._fuse.guard(self._recorder.pause)(str(reason))

    def _end_pause(self) -> None:
        if self._recorder is not None:
            self._fuse.guard(self._recorder.resume)()
        if self._waits is not None:
            self._waits.hang()

    def close(self) -> None:
        """Write what is left and take every hook, file handle and lock away. Idempotent."""
        self._close(at_exit=False)

    @unseen_by_modes
    def _close(self, *, at_exit: bool) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
            _live.discard(self)
            logger.warning(
                "ddpprobe: nothing was recorded: install() came before the process group, and no "
                "training forward of the model was seen since"
            )
        if (recorder := self._let_go()) is None:
            return
        midway = recorder.is_inside_a_step
        words = Fuse("last words").guard(last_words.goodbye)(at_exit=at_exit, midway=midway)
        if self._joined is not None:
            seconds = 0.0 if words is None else peer_watcher.patience(words, midway=midway)
            Fuse("close").guard(self._joined.peer_watcher.close)(seconds)
        Fuse("close").guard(recorder.close)(words)
        if self._joined is not None:
            Fuse("close").guard(self._joined.close)()
            Fuse("close").guard(self._joined.release)()
        _live.discard(self)
        if not _live:
            Fuse("signal handlers").guard(OF_THE_SCRIPT.release)()
        for root in [root for root, probe in _probed.items() if probe is self]:
            del _probed[root]
        error = None if words is None else words.error
        stopped = error is None or error.type == AnomalyStop.__name__
        while self._told_close and stopped and not at_exit:
            self._told_close.pop()()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Probe], tuple[()]]:
        """Let a model that holds it be copied and pickled: a copy does nothing."""
        return (Probe, ())

    def _let_go(self) -> Recorder | None:
        """Forget recorder and model, which a script may keep this object longer than."""
        recorder, self._recorder, self._order_handler = self._recorder, None, None
        self._log = self._step = self._note = _nothing
        return recorder

    def _rest(self) -> None:
        if self._joined is not None:
            self._joined.rest()

    def _go_on(self) -> None:
        if self._joined is not None:
            Fuse("watching the other ranks").guard(self._joined.peer_watcher.go_on)()

    def _abandon(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
        if (recorder := self._let_go()) is not None:
            recorder.abandon()
        if self._joined is not None:
            self._joined.abandon()


@overload
def install(
    model: nn.Module, *, run_dir: str | os.PathLike[str] | None = ..., every: int | Schedule = ...,
    include: str | Iterable[str] = ..., exclude: str | Iterable[str] = ...,
    capture: str | Iterable[str] = ..., on_anomaly: str | Callable[[Anomaly], object] = ...,
    budget: float | None = ..., backward: str = ..., name: str | None = ..., daemon: str = ...,
    first_step: int = ..., detectors: Mapping[str, object] | None = ..., task: str | None = ...,
    histograms: str | Iterable[str] = ...,
) -> Probe: ...  # fmt: skip
@overload
def install(model: Mapping[str, nn.Module], **options: Any) -> Probes[Probe]: ...  # noqa: ANN401
def install(  # type: ignore[misc]  # a keyword that is none of these is a TypeError
    model: nn.Module | Mapping[str, nn.Module],
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
    detectors: Mapping[str, object] | None = None,
    task: str | None = None,
    histograms: str | Iterable[str] = (),
) -> Probe | Probes[Probe]:
    """Observe `model` from now on: the one line in a training script.

    Call it on every rank, before or after wrapping the model. Before `init_process_group` it only
    looks at model and arguments; the ranks then agree in the first training forward, where what is
    wrong is told in a warning on every rank, and the training goes on without a probe.

    Args:
        model: plain, or under DistributedDataParallel, FullyShardedDataParallel (FSDP1),
            fully_shard (FSDP2, HSDP), parallelize_module (tensor parallelism) or a mixture; of a
            pipeline, this rank's stage. Or several by name, such as a generator and its critic:
            see `Probes`; an option may then be a mapping from these names, too.
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
            `optimizer.step()` at the same step, after the captured ones. A function: it is called
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
        detectors: what is not to be as by default, by detector: settings by name, or False for
            without it: `{"straggler": False, "grad_spike": {"z": 10}}`. `ddpprobe replay --list`
            lists them. They are written down: who reads the run judges it as the daemon did.
        task: "gan" or "rl" switches those detectors off that take the numbers of healthy training
            of this kind for faults; `detectors` holds over it.
        histograms: globs over FQNs of modules and parameters, at most 128 of them, whose outputs
            and gradients also get a histogram and a share of elements near zero at every sampled
            step (`Run.histograms`). Each must match something on some rank.

    Environment (each overrides the argument): `DDPPROBE_DIR`, `DDPPROBE_EVERY`, `DDPPROBE_BUDGET`,
    `DDPPROBE_LISTEN`, `DDPPROBE_DISABLE=1` (returns a probe that does nothing).

    Raises:
        InstallError: a wrong argument, or some rank refused; the same text on every rank.
    """
    announce_install()
    said = {
        "run_dir": run_dir, "every": every, "include": include, "exclude": exclude,
        "capture": capture, "on_anomaly": on_anomaly, "budget": budget, "backward": backward,
        "name": name, "daemon": daemon, "first_step": first_step, "detectors": detectors,
        "task": task, "histograms": histograms,
    }  # fmt: skip
    if isinstance(model, Mapping):
        defaults = _defaults()
        return install_each(model, said, lambda one, o: _install(one, options_of(**defaults | o)))
    return _install(model, options_of(**said))  # type: ignore[arg-type]  # as the signature says


@unseen_by_modes
def _install(model: nn.Module, options: InstallOptions) -> Probe:
    """Observe one model from now on."""
    if (probe := Probe())._is_off:  # noqa: SLF001  (same module)
        return probe
    if not process_group.exists() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        meet = Fuse("install").guard(partial(_meet_group, probe, model, options))
        probe._waits = FirstForward(_described(model, options), meet, always=options.follows)  # noqa: SLF001  (same module)
        _live.add(probe)
    else:
        _join(probe, model, options)
    return probe


def install_within(called: nn.Module, model: nn.Module, **options: Any) -> Probe:  # noqa: ANN401
    """Observe `model` from within its first training forward, on every rank in its own.

    Args:
        called: the module whose call has just begun: the model, what wraps it, or a part of it.
        model: as for `install`.
        options: keywords of `install`; what is not given is as there by default.

    Raises:
        InstallError: some rank refused; the same text on every rank.
    """
    if (probe := Probe())._is_off:  # noqa: SLF001  (same module)
        return probe
    made = options_of(**_defaults() | options)
    if not process_group.exists() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _meet_group(probe, model, made, called)
    else:
        _join(probe, outermost(model), made, called)
    return probe


def install_driven(model: nn.Module, engine: Engine, **options: Any) -> Probe:  # noqa: ANN401
    """Observe a model as `install` does, while an engine tells of its steps and gradients."""
    return _install(model, replace(options_of(**_defaults() | options), engine=engine))


def _defaults() -> dict[str, Any]:
    known = inspect.signature(install).parameters.values()
    return {each.name: each.default for each in known if each.name != "model"}


def _described(model: nn.Module, options: InstallOptions) -> Topology:
    """Look at model and arguments before there is anybody to agree with."""
    try:
        return _checked(model, options).topology
    except ValueError as error:
        raise InstallError(str(error)) from error


def _checked(model: nn.Module, options: InstallOptions) -> Checked:
    """Look at model and arguments where an error reaches all ranks. Raises ValueError."""
    switches.check(switches.STRICT)
    return options.check(model, _run_of)


def _meet_group(probe: Probe, model: nn.Module, options: InstallOptions, called: nn.Module) -> None:
    """In the first training forward after an `install()` that waits: join the process group."""
    probe._waits = None  # noqa: SLF001  (same module)
    if process_group.exists():
        _join(probe, outermost(model), options, called)
        return
    process_group.tell_missing()


def _is_not_alone(
    probe: Probe, model: weakref.ref[nn.Module], options: InstallOptions, called: nn.Module
) -> bool:
    """In the first training forward of what looked like a job of one process: is it one?

    Lightning starts its other processes in `fit()`. Then the run goes on as a further attempt, in
    which all ranks are; the recorder that asks is closed.
    """
    found = model()
    if found is None or not process_group.exists() or dist.get_world_size() == 1:
        return False
    probe.close()
    options = options.continuing(probe.run_dir)
    Fuse("install").guard(_join)(probe, outermost(found), options, called)
    return True


@unseen_by_modes
def _join(
    probe: Probe, model: nn.Module, options: InstallOptions, inside: nn.Module | None = None
) -> None:
    """Agree with the other ranks, and begin to observe.

    Args:
        probe: speaks for it from then on.
        model: as it is now.
        options: of `install()`.
        inside: the module whose first training forward has just begun.

    Raises:
        InstallError: some rank refused; the same text on every rank.
    """
    rank, world_size, store = process_group.job()
    joined, checked = join_run(
        store, process_group.topic(), rank, world_size, options,
        partial(_checked, model, options),
    )  # fmt: skip
    topology = checked.topology
    recorder, order_handler, stopwatch = make_recorder(joined, checked, options, rank, world_size)
    compile_kernels(topology.device, list(topology.root.parameters()))
    Fuse("starting the disk thread").guard(joined.start)(recorder.is_reducing)
    Fuse("watching the other ranks").guard(joined.watch_peers)()
    Fuse("signal handlers").guard(OF_THE_SCRIPT.look)()
    alone = partial(_is_not_alone, probe, weakref.ref(model), options)
    recorder.start(inside, None if process_group.exists() else alone)
    probe._begin(recorder, joined, order_handler, stopwatch)  # noqa: SLF001  (same module)
    _probed[topology.root] = probe
    _live.add(probe)
    if len(_live) == _MANY:
        tell_many(_MANY)
    interpreter_end.register(_close_all)
    interpreter_end.hear(_close_all)


def _nothing(*_: object) -> None:
    """Stand in where ddpprobe is switched off."""


def _run_of(root: nn.Module) -> str | None:
    """Return the run directory of the living probe on `root`, None without one."""
    probe = _probed.get(root)
    return probe.run_dir if probe in _live else None


def _close_all() -> None:
    for probe in list(_live):
        probe._close(at_exit=True)  # noqa: SLF001  (same module)


def _of_all(act: Callable[[Probe], None]) -> None:
    for probe in list(_live):
        act(probe)


interpreter_end.register(_close_all)
os.register_at_fork(
    before=partial(_of_all, Probe._rest),  # noqa: SLF001  (same module)
    after_in_child=partial(_of_all, Probe._abandon),  # noqa: SLF001
    after_in_parent=partial(_of_all, Probe._go_on),  # noqa: SLF001
)

__all__ = ["Probe", "Probes", "install"]
