"""The journals of an attempt, as folder and reader find them."""

from __future__ import annotations

from pathlib import Path

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.store import segments
from ddpprobe.store.segments import JournalSource, sources_of

from ..made_runs import Made


def test_of_one_rank_its_own_journals_are_found(tmp_path: Path) -> None:
    run = Made(tmp_path / "run", ranks=12).whole(1).close()
    whole = sources_of(run, 0)
    assert [s.rank for s in whole] == [*range(12), None]
    assert [sources_of(run, 0, rank=s.rank) for s in whole[:-1]] == [[s] for s in whole[:-1]]
    assert sources_of(run, 0, rank=12) == []


def test_who_asks_for_each_of_many_ranks_makes_as_many_places_as_there_are(
    tmp_path: Path, monkeypatch
) -> None:
    """All of them were made for each: that of a thousand ranks took minutes."""
    made: list[JournalSource] = []

    def source(*fields) -> JournalSource:
        made.append(JournalSource(*fields))
        return made[-1]

    run = Made(tmp_path / "run", ranks=12).whole(1).close()
    monkeypatch.setattr(segments, "JournalSource", source)
    reader = MergedReader(run)
    assert [len(reader.rank_steps(0, rank)[0]) for rank in range(12)] == [1] * 12
    assert len(made) == 12
