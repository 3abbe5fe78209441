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
        left_out: files that match and are not mutated.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    without: str = ""
    left_out: tuple[str, ...] = ()


ROOMS = {
    "records": Room(
        (
            "ddpprobe/records/step.py",
            "ddpprobe/records/derived.py",
            "ddpprobe/records/every_loss.py",
            "ddpprobe/records/site_stats.py",
        ),
        (
            "records/test_step.py",
            "records/test_derived.py",
            "records/test_every_loss.py",
            "records/test_site_stats.py",
        ),
        "reference_names",  # the documents are not there
    ),
    "merge": Room(
        ("ddpprobe/records/merge.py",),
        ("records/test_step.py", "records/test_first_bad.py", "records/test_histogram.py"),
    ),
    "gather": Room(("ddpprobe/records/gather.py",), ("records/test_gather.py",), "linear_time"),
    "journal": Room(
        (
            "ddpprobe/rundir/journal.py",
            "ddpprobe/rundir/framing.py",
        ),
        ("rundir/test_journal.py", "rundir/test_framing.py", "records/test_histogram.py"),
        "kill_9",
    ),
    "detectors": Room(
        ("ddpprobe/detectors/*.py",),
        ("detectors",),
        "section_of_each_detector",  # the documents are not there
    ),
    "steps": Room(
        (
            "ddpprobe/rank/step_clock.py",
            "ddpprobe/rank/first_forward.py",
            "ddpprobe/rank/host.py",
            "ddpprobe/rank/lending.py",
            "ddpprobe/rank/owners.py",
            "ddpprobe/rank/held_record.py",
            "ddpprobe/rank/logged_numbers.py",
            "ddpprobe/rank/unsampled_losses.py",
        ),
        (
            "rank/test_step_clock.py",
            "rank/test_step_events.py",
            "rank/test_first_forward.py",
            "rank/test_held_record.py",
            "rank/test_teacher.py",
            "rank/test_unsampled_losses.py",
            "rank/test_lent_passes.py",
            "rank/test_engine.py",
            "rank/test_clocks_of_others.py",
        ),
        "(two_ranks or before_the_process_group)",
    ),
    "models": Room(
        ("ddpprobe/rank/passes.py", "ddpprobe/reader/models.py"),
        ("rank/test_passes.py", "reader/test_models.py"),
    ),
    "topology": Room(("ddpprobe/rank/topology/*.py",), ("rank/topology", "rank/test_engine.py")),
    "hooks": Room(
        ("ddpprobe/rank/hooks/*.py",),
        (
            "rank/hooks",
            "rank/stats/test_many.py",
            "rank/test_first_forward.py",
            "rank/test_step_clock.py",
        ),
        # The switch between mutants would become a part of the graphs of torch.compile.
        "(test_compiled or two_ranks or before_the_process_group)",
        left_out=("ddpprobe/rank/hooks/compiled.py", "ddpprobe/rank/hooks/record_op.py"),
    ),
    "verify": Room(
        ("ddpprobe/reader/verify/*.py",),
        (
            "reader/verify/test_findings.py",
            "reader/verify/test_verify.py",
            "store/captures/test_captures.py",
        ),
        "every_mutation",  # 13 s
    ),
    "exits": Room(
        (
            "ddpprobe/cli/main.py",
            "ddpprobe/cli/output.py",
            "ddpprobe/cli/verbs.py",
            "ddpprobe/cli/commands/anomalies.py",
            "ddpprobe/cli/commands/verify.py",
        ),
        (
            "cli/test_main.py",
            "cli/test_words.py",
            "reader/test_models.py",
            "reader/verify/test_verify.py",
        ),
        # No documents are there; 13 s; what mutmut warns of is printed by the process it starts.
        "(documents_say_the_same or every_mutation or python_m_ddpprobe or pipe_is_quiet)",
    ),
    "witnesses": Room(
        (
            "ddpprobe/rank/peer_watcher.py",
            "ddpprobe/rank/last_words.py",
            "ddpprobe/rank/exceptions.py",
        ),
        (
            "rank/test_peer_watcher.py",
            "rank/test_last_words.py",
            "rank/test_exceptions.py",
            "rank/test_signal_handlers.py",
        ),
        "end_of_the_interpreter",  # what mutmut warns of is printed by the process it starts
    ),
    "ends": Room(("ddpprobe/ends/*.py", "ddpprobe/records/fate.py"), ("ends",)),
}
