"""The loggers of a framework are told where the run is, a few numbers, and the verdict.

Nothing is started here: each sink speaks through the client of a logger that is there already, on
the rank that has it. In a loop of your own:

probe = ddpprobe.install(model)
attach(probe, wandb.run)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, final

from torch import nn

from ddpprobe.errors import InstallError
from ddpprobe.integrations.verdict import verdict
from ddpprobe.probe import Probe, install
from ddpprobe.rank import process_group
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir.fuse import Fuse

RUN_ID, RUN_DIR, VERDICT = "ddpprobe/run_id", "ddpprobe/run_dir", "ddpprobe/verdict"
STEP, PAGES = "ddpprobe/step", "ddpprobe/pages"


class Sink(Protocol):
    """One logger; what it raises is contained by who calls."""

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers of an optimizer step."""

    def facts(self, values: Mapping[str, str]) -> None:
        """Keep texts of the run as a whole; later ones replace earlier ones of the same name."""


@final
class WandbSink:
    """A `wandb.Run`, whose own step is not touched: charts are over `ddpprobe/step`.

    Args:
        run: under way.
        commit: write a row for each sampled step. A loop that gives `step=` itself must not have
            that: wandb then drops its numbers. Without it the next row of the loop takes the newest
            numbers along.
    """

    def __init__(self, run: Any, *, commit: bool = False) -> None:  # noqa: ANN401  (wandb's)
        self._run, self._commit = run, commit
        run.define_metric(STEP, hidden=True)
        run.define_metric("ddpprobe/*", step_metric=STEP)

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log a row, or a part of one."""
        self._run.log({**values, STEP: step}, commit=self._commit)

    def facts(self, values: Mapping[str, str]) -> None:
        """Keep them in the run's summary."""
        self._run.summary.update(dict(values))


@final
class MlflowSink:
    """A run of MLflow, by an `MlflowClient` and the run's id; also one that has ended."""

    def __init__(self, client: Any, run_id: str) -> None:  # noqa: ANN401  (MLflow's)
        self._client, self._run_id = client, run_id

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log them in MLflow's own thread: the store may be far away."""
        metric = sys.modules["mlflow"].entities.Metric
        now = int(time.time() * 1000)
        told = [metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=told, synchronous=False)

    def facts(self, values: Mapping[str, str]) -> None:
        """Keep them as tags."""
        for name, value in values.items():
            self._client.set_tag(self._run_id, name, value)


@final
class TensorBoardSink:
    """A `SummaryWriter`, of tensorboard or of tensorboardX."""

    def __init__(self, writer: Any) -> None:  # noqa: ANN401  (one of two packages')
        self._writer = writer

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars, which the writer's own thread writes."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def facts(self, values: Mapping[str, str]) -> None:
        """Keep them as texts."""
        for name, value in values.items():
            self._writer.add_text(name, value)
        self._writer.flush()


def sink_of(client: object, *, run_id: str | None = None, commit: bool = False) -> Sink | None:
    """Return how to speak to a logger's client; None of one that is not known.

    Args:
        client: a `wandb.Run`, an `mlflow.ActiveRun`, an `MlflowClient` with a `run_id`, or a
            `SummaryWriter`.
        run_id: of MLflow's run.
        commit: see `WandbSink`.
    """
    package = type(client).__module__.partition(".")[0]
    if package == "wandb":
        return WandbSink(client, commit=commit)
    if package == "mlflow":
        info = getattr(client, "info", None)
        if info is not None:
            return MlflowSink(sys.modules["mlflow"].MlflowClient(), info.run_id)
        return MlflowSink(client, run_id) if run_id else None
    if hasattr(client, "add_scalar") and hasattr(client, "add_text"):
        return TensorBoardSink(client)
    return None


@final
class LoggerLink:
    """Tells sinks of one run: its id and directory now, numbers as they come, the verdict after.

    A sink that fails is told nothing more; the others go on, and so does the training.

    Args:
        sinks: returns those of the loggers, and is asked on rank 0 only. None if there are no
            loggers, on no rank.
    """

    def __init__(self, sinks: Callable[[], Iterable[Sink]] | None) -> None:
        self._is_wanted = sinks is not None
        made: list[Sink] = []
        if sinks is not None and process_group.leads():
            Fuse("loggers").guard(lambda: made.extend(sinks()))()
        self._sinks = [(sink, Fuse(f"telling {type(sink).__name__}")) for sink in made]
        self._pages = 0
        self._run_dir = ""

    def counting(self, on_anomaly: Any) -> Any:  # noqa: ANN401  (`install`'s, right or wrong)
        """Return an `on_anomaly` for all ranks that counts pages for the loggers, too.

        "stop" stays what it is, and the loggers learn from the verdict why it ended.
        """
        is_function = callable(on_anomaly)
        if not self._is_wanted or not (is_function or on_anomaly == "record"):
            return on_anomaly

        def act(anomaly: Anomaly) -> None:
            self._pages += 1
            if is_function:
                on_anomaly(anomaly)

        return act

    def begin(self, probe: Probe) -> None:
        """Link them to a probe's run, if it has one."""
        if not self._sinks or probe.run_dir is None or probe.run_id is None:
            return
        self._run_dir = probe.run_dir
        self._keep({RUN_ID: probe.run_id, RUN_DIR: probe.run_dir})
        probe.listen(self)

    def sampled(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log what is known; of pages nothing is said before there is one."""
        told = {f"ddpprobe/{name}": value for name, value in numbers.items()}
        if self._pages:
            told[PAGES] = float(self._pages)
        for sink, fuse in self._sinks:
            fuse.guard(sink.numbers)(told, step)

    def closed(self) -> None:
        """Say what the detectors made of the run."""
        self._keep({VERDICT: verdict(self._run_dir)})

    def _keep(self, facts: Mapping[str, str]) -> None:
        for sink, fuse in self._sinks:
            fuse.guard(sink.facts)(facts)


def install_linked(
    model: nn.Module,
    sinks: Callable[[], Iterable[Sink]] | None,
    **options: Any,  # noqa: ANN401
) -> Probe:
    """Observe a model as `ddpprobe.install` does, and tell its loggers of the run.

    Args:
        model: as for `install`.
        sinks: as of `LoggerLink`.
        options: keywords of `install`.
    """
    link = LoggerLink(sinks)
    options["on_anomaly"] = link.counting(options.get("on_anomaly", "record"))
    probe = install(model, **options)
    link.begin(probe)
    return probe


def attach(probe: Probe, *clients: object) -> None:
    """Tell loggers of a probe's run, in a loop of your own; call it on rank 0.

    How many pages there were while it trained is told by the frameworks' own callbacks only.

    Args:
        probe: with a run (`run_dir`).
        clients: as `sink_of` takes them.

    Raises:
        InstallError: a client is none of those.
    """
    sinks = []
    for client in clients:
        sink = sink_of(client)
        if sink is None:
            raise InstallError(
                f"attach() takes a wandb.Run, an mlflow.ActiveRun or a SummaryWriter, got "
                f"{type(client).__name__}"
            )
        sinks.append(sink)
    LoggerLink(lambda: sinks).begin(probe)
