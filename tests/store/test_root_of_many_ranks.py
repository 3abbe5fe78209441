"""The root of a store of many ranks and nodes: it stays a file that readers take apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zarr

from ddpprobe.rundir import safe_read
from ddpprobe.store.commit import Files, encode
from ddpprobe.store.manifest import GROUP_JSON, State
from ddpprobe.store.remote.upload_root import is_sealed
from ddpprobe.store.root import Root
from ddpprobe.store.writer import StoreWriter

from .. import made_nodes
from ..made_runs import NODE, Made


def sealed(made: Made) -> StoreWriter:
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    folder.seal()
    folder.close()
    return folder


def root_of(made: Made) -> bytes:
    return (made.run.store / GROUP_JSON).read_bytes()


def test_metadata_of_too_many_ranks_is_not_put_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 340 ranks of three sites it was more than readers and writers take apart."""
    monkeypatch.setattr(safe_read, "MAX_JSON_BYTES", 60_000)
    made = Made(tmp_path, ranks=4).whole(3)
    made.close()
    assert sealed(made).damaged == {}
    assert len(root_of(made)) < 60_000
    assert is_sealed({GROUP_JSON: root_of(made)})
    assert zarr.open_group(made.run.store, mode="r")["attempt_000/rank_00003/step"].shape == (3,)
    again = Made(tmp_path, ranks=4, attempt=1).whole(3)
    again.close()
    folder = StoreWriter(made.run, NODE, block=2, durable=False)
    folder.fold()
    assert not is_sealed({GROUP_JSON: root_of(made)})
    folder.close()


def test_a_root_that_an_older_version_made_too_large_keeps_no_later_attempt_out(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path, ranks=1).whole(3)
    made.close()
    sealed(made)
    document = json.loads(root_of(made))
    document["attributes"]["large"] = "x" * safe_read.MAX_JSON_BYTES
    kept = (made.run.store / "attempt_000" / GROUP_JSON).read_bytes()
    files = {f"attempt_000/{GROUP_JSON}": kept, GROUP_JSON: encode(document)}
    Files(made.run, "", durable=False).commit(State(), files)
    again = Made(tmp_path, ranks=1, attempt=1).whole(3)
    again.close()
    assert sealed(again).damaged == {}
    root = zarr.open_group(made.run.store, mode="r")
    assert root.metadata.consolidated_metadata is not None
    assert {*root.group_keys()} == {"attempt_000", "attempt_001"}


def test_of_many_nodes_on_one_disk_the_last_one_lists_what_all_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each did, and each took the list of the one before away: their square, under a lock."""
    seals: list[Root] = []
    seal = Root.seal
    monkeypatch.setattr(Root, "seal", lambda root: (seals.append(root), seal(root))[-1])
    run = made_nodes.make([tmp_path / "run"] * 4, 1, captured=())[0]
    assert len(seals) == 1
    root = zarr.open_group(run.store, mode="r")
    listed = root.metadata.consolidated_metadata
    assert listed is not None
    assert {f"attempt_000/rank_{rank:05d}" for rank in range(4)} <= {*listed.flattened_metadata}


def test_a_seal_behind_which_nobody_has_written_is_not_made_again(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1).whole(3)
    made.close()
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    folder.seal()
    before = (made.run.store / GROUP_JSON).stat()
    folder.seal()
    folder.close()
    assert (made.run.store / GROUP_JSON).stat() == before
