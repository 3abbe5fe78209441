"""Which files are mutated, and which tests must notice: only fast ones of the file's own room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """Files that are mutated together, and the test files that judge them.

    Attributes:
        files: patterns, relative to the repository.
        tests: files, relative to `tests/`, without `.py`.
        without: words of a `-k` expression: tests that start processes and take long.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    without: str = ""


ROOMS = {
    "records": Room(("ddpprobe/records.py",), ("test_records",)),
    "merge": Room(("ddpprobe/merge.py",), ("test_records",)),
    "gather": Room(("ddpprobe/gather.py",), ("test_gather",), "linear_time"),
    "journal": Room(("ddpprobe/journal.py",), ("test_journal",), "kill_9"),
    "detectors": Room(
        ("ddpprobe/detectors/*.py",),
        (
            "test_detectors_coverage", "test_detectors_desync", "test_detectors_grad_spike",
            "test_detectors_loss_scale", "test_detectors_nonfinite", "test_detectors_suite",
        ),
    ),
    "steps": Room(("ddpprobe/steps.py",), ("test_steps",)),
    "topology": Room(
        ("ddpprobe/topology/*.py",), ("test_topology", "test_placement", "test_stages")
    ),
    "hooks": Room(("ddpprobe/hooks/*.py",), ("test_hooks", "test_watch", "test_capturing")),
    "verify": Room(("ddpprobe/replay/verify.py",), ("test_verify",)),
    "exits": Room(
        ("ddpprobe/cli.py", "ddpprobe/commands/anomalies.py", "ddpprobe/commands/verify.py"),
        ("test_cli", "test_verify"),
    ),
}  # fmt: skip
