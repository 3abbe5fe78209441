"""A recorder and what it needs, put together from what the ranks have agreed on."""

from __future__ import annotations

from functools import partial

from ddpprobe.rank.capture.capturing import Capturing
from ddpprobe.rank.capture.pack_writer import PackWriter
from ddpprobe.rank.interval import Pacer
from ddpprobe.rank.join import Joined
from ddpprobe.rank.journal_writer import Identity
from ddpprobe.rank.options import Checked, InstallOptions
from ddpprobe.rank.order_handler import OrderHandler
from ddpprobe.rank.recorder import Recorder
from ddpprobe.rundir.stopwatch import Stopwatch


def make_recorder(
    joined: Joined, checked: Checked, options: InstallOptions, rank: int, world_size: int
) -> tuple[Recorder, OrderHandler, Stopwatch]:
    """Return a recorder that has not begun, what does the head's orders in it, and its stopwatch.

    Args:
        joined: this rank's place in the run.
        checked: the options, looked at; the model.
        options: of `install()`.
        rank: of this process.
        world_size: of the job.
    """
    files = joined.record_files
    pacer = Pacer(
        checked.schedule, checked.budget, joined.channel, files.journal, files.heartbeat,
        leads=rank == 0, ahead=checked.topology.device.type != "cpu",
    )  # fmt: skip
    path = partial(joined.run.pack, joined.attempt, joined.node, rank)
    header = {"attempt": joined.attempt, "rank": rank, "world_size": world_size}
    stopwatch = Stopwatch()
    if files.disk_thread is not None:
        files.disk_thread.tell_cpu = partial(setattr, stopwatch, "beside")
    pack_writer = PackWriter(path, header, files.journal, files.disk_thread)
    capturing = Capturing(options.capture, pack_writer, rank, stopwatch)
    order_handler = OrderHandler(
        joined.board, pacer.add, capturing.capture, files.journal, options.on_anomaly
    )
    recorder = Recorder(
        checked.topology, Identity(rank, world_size, joined.attempt), options, joined, pacer,
        order_handler, capturing, stopwatch,
    )  # fmt: skip
    return recorder, order_handler, stopwatch
