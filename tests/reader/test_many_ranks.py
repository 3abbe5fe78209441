"""What a question about a run costs grows with its ranks, not with ranks times nodes or ranks.

Counted are calls, of Python and of C: at 1,024 ranks on 128 nodes `info` took two minutes, most of
which went into looking for each rank on each node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from ddpprobe.errors import UnknownSeries
from ddpprobe.reader.compare.timeline import timeline
from ddpprobe.reader.last_beats import last_beats
from ddpprobe.reader.run import Run, open_run
from ddpprobe.rundir.paths import RunDir

from .. import made_nodes
from ..made_runs import Made

FEW, MANY = 6, 24  # nodes


def calls(question: Callable[[], object]) -> int:
    counted = count()

    def note(_: object, event: str, __: object) -> None:
        if event in {"call", "c_call"}:
            next(counted)

    sys.setprofile(note)
    try:
        question()
    finally:
        sys.setprofile(None)
    return next(counted)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return runs of few and of many nodes on one disk, journals of each as they were written."""
    few, many = tmp_path_factory.mktemp("few") / "run", tmp_path_factory.mktemp("many") / "run"
    for path, nodes in ((few, FEW), (many, MANY)):
        made_nodes.make([path] * nodes, 2, seal=False, captured=())
    return few, many


QUESTIONS: dict[str, Callable[[Run], object]] = {
    "info": Run.info,
    "anomalies": Run.anomalies,
    "endings": Run.endings,
    "completeness": Run.completeness,
    "each rank's records": lambda run: [list(timeline(run, rank)) for rank in run.ranks()],
    "each rank's losses": lambda run: [run.scalars("loss", rank) for rank in run.ranks()],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_of_four_times_as_many_nodes_a_question_takes_not_much_more_than_four_times_as_long(
    name: str, runs: tuple[Path, Path]
) -> None:
    few, many = (calls(partial(QUESTIONS[name], open_run(path))) for path in runs)
    assert many < 5.5 * few


def test_each_rank_s_last_beat_is_found_on_its_node(runs: tuple[Path, Path]) -> None:
    found = last_beats(RunDir(runs[0]), 0)
    assert {rank: node for rank, (node, _) in found.items()} == {
        rank: f"node_{rank // 2:04d}" for rank in range(2 * FEW)
    }
    assert last_beats(RunDir(runs[0]), 1) == {}


def test_a_rank_is_known_by_its_journal_or_its_group_and_from_when_it_writes(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path, ranks=1).whole(3)
    run = open_run(tmp_path)
    assert run.has_rank(0, 0)
    assert not run.has_rank(1, 0)
    assert not run.has_rank(-1, 0)
    assert not run.has_rank(0, 1)
    made.ranks = 2
    made.whole(1, told=False)
    assert run.has_rank(1, 0)
    assert len(list(run.records(1))) == 1
    made.close()


def test_of_a_rank_that_a_run_has_not_the_others_are_named_as_ranges(
    runs: tuple[Path, Path],
) -> None:
    with pytest.raises(UnknownSeries, match="no rank 99 in this run; it has 0-11"):
        open_run(runs[0]).scalars("loss", rank=99)
