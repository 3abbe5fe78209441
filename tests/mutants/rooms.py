"""Which files are mutated, and which tests must notice: only fast ones of the file's own room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """Files that are mutated together, and the test files that judge them.

    Attributes:
        files: patterns, relative to the repository.
        tests: files or folders, relative to `tests/`.
        without: words of a `-k` expression: tests that start processes and take long.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    without: str = ""


ROOMS = {
    "records": Room(("ddpprobe/records/step.py",), ("records/test_step.py",)),
    "merge": Room(("ddpprobe/records/merge.py",), ("records/test_step.py",)),
    "gather": Room(("ddpprobe/records/gather.py",), ("records/test_gather.py",), "linear_time"),
    "journal": Room(("ddpprobe/rundir/journal.py",), ("rundir/test_journal.py",), "kill_9"),
    "detectors": Room(("ddpprobe/detectors/*.py",), ("detectors",)),
    "steps": Room(("ddpprobe/rank/step_clock.py",), ("rank/test_step_clock.py",)),
    "topology": Room(("ddpprobe/rank/topology/*.py",), ("rank/topology",)),
    "hooks": Room(
        ("ddpprobe/rank/hooks/*.py",),
        ("rank/hooks/test_eager.py", "rank/hooks/test_watch.py", "rank/capture/test_capturing.py"),
    ),
    "verify": Room(("ddpprobe/reader/verify/verify.py",), ("reader/verify/test_verify.py",)),
    "exits": Room(
        (
            "ddpprobe/cli/main.py",
            "ddpprobe/cli/commands/anomalies.py",
            "ddpprobe/cli/commands/verify.py",
        ),
        ("cli/test_main.py", "reader/verify/test_verify.py"),
        "documents_say_the_same",  # they are not copied
    ),
}
