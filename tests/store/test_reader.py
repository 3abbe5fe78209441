"""What a stock reader sees, and what ours makes of a store that is damaged or hostile."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from ddpprobe.errors import StoreDamaged
from ddpprobe.records.step import COUNTS, VALUES
from ddpprobe.store import format as fmt
from ddpprobe.store import regions
from ddpprobe.store.group_names import attempts_of, groups_of
from ddpprobe.store.manifest import Manifest, manifest_path, read_regular, version_of
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.writer import StoreWriter

from ..made_runs import ANOMALY, NODE, Made, bad, head_merge, key, record, sites

STEPS = 24
RANK_1 = "attempt_000/rank_00001"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed run of two ranks: 24 steps in blocks of 8, a fourth site from step 12 on."""
    made = Made(tmp_path_factory.mktemp("model") / "run").whole(STEPS, grow_at=12)
    made.close()
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    folder.seal()
    folder.close()
    return made.path


@pytest.fixture
def made(model: Path, tmp_path: Path) -> Made:
    shutil.copytree(model, tmp_path / "run")
    return Made(tmp_path / "run")


def test_xarray_opens_a_rank_clean_with_dims_coordinates_and_equal_values(made: Made) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xr.open_zarr(made.run.store, group=RANK_1) as dataset:
            assert dict(dataset.sizes) == {
                "step": STEPS, "site": 4, "count_stat": 7, "value_stat": 4, "scalar": 2,
                "digest": 2,
            }  # fmt: skip
            assert {"step", "wall_time", "site", "fqn", "kind"} <= set(dataset.coords)
            assert list(dataset.count_stat.values) == list(COUNTS)
            assert list(dataset.value_stat.values) == list(VALUES)
            assert dataset.wall_time.dtype.kind == "M"
            for step in range(STEPS):
                n = 3 + (step >= 12)
                row = dataset.sel(step=step)
                expected = record(1, step, n)
                assert np.array_equal(row.counts.values[:n], expected.counts)
                assert np.array_equal(row["values"].values[:n], expected.values)
                assert np.isnan(row["values"].values[n:]).all()
            rms = dataset["values"].sel(site=str(sites(1)[0]), value_stat="sum_sq")
            assert rms.shape == (STEPS,)
            losses = dataset.scalars.sel(scalar="loss").values
            assert np.array_equal(losses, [1.0 / (s + 1) for s in range(STEPS)])


def test_a_datatree_holds_every_group_live_and_sealed(tmp_path: Path) -> None:
    made = Made(tmp_path).whole(40)
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    folder.fold()
    groups = {"anomalies", "merged", NODE, "rank_00000", "rank_00001"}
    # While the run lives its root is not consolidated: a copy would hide what is folded next.
    for live in ({"consolidated": False}, {}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with xr.open_datatree(made.run.store, engine="zarr", **live) as tree:
                assert set(tree["attempt_000"].children) == groups
                assert tree["attempt_000/merged"].sizes["rank"] == 2
        made.close()
        folder.seal()
    folder.close()


def test_merged_records_come_back_with_their_ranks_and_with_those_that_are_missing(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path, ranks=3)
    told = [
        head_merge([record(r, 0) for r in range(3)]),
        head_merge([record(0, 1, missing=(1, 2))]),
        record(2, 2, 0, sampled=False, partial=True, first_bad=bad(2, 2), scalars={}),
        head_merge(
            [
                record(0, 4),
                record(1, 4, digests={("w\0\udc80", "0/2"): {-(2**63): 2, 2**63 - 1: 1 << 300}}),
            ]
        ),
        head_merge([record(r, 5, scalars={r: {"loss": float("nan")}}) for r in range(3)]),
    ]
    for one in told:
        made.tell(3, one)
    made.close()
    folder = StoreWriter(made.run, NODE, durable=False)
    folder.seal()
    folder.close()
    group = StoredGroup(made.run, "attempt_000/merged")
    assert [key(r) for r in group.records(0)] == [key(r) for r in told]
    assert next(group.scalar("loss")) == (0, {0: 1.0, 1: 1.0, 2: 1.0})
    assert group.lost == []


def test_every_codec_chain_ends_in_a_checksum(made: Made) -> None:
    paths = list(made.run.store.rglob("zarr.json"))
    documents = [json.loads(p.read_text()) for p in paths]
    arrays = [d for d in documents if d["node_type"] == "array"]
    assert len(arrays) > 50
    for document in arrays:
        last = document["codecs"][-1]
        if last["name"] == "sharding_indexed":
            inner = last["configuration"]
            assert inner["index_codecs"][-1]["name"] == "crc32c"
            last = inner["codecs"][-1]
        assert last["name"] == "crc32c"


def test_names_are_ids_and_module_names_are_data(made: Made) -> None:
    for path in made.run.store.rglob("*"):
        assert "mlp" not in str(path.relative_to(made.run.store))


@pytest.mark.parametrize(
    ("name", "lost_steps"),
    [("counts/c/1/0/0", (8, 15)), ("values/c/0/0/0", (0, 7)), ("order/c/2/0", (16, 23))],
)
@pytest.mark.parametrize("how", ["delete", "flip", "truncate", "empty"])
def test_a_damaged_chunk_costs_its_block_and_is_listed(
    made: Made, name: str, lost_steps: tuple[int, int], how: str
) -> None:
    path = made.run.store / RANK_1 / name
    damage(path, how)
    group = StoredGroup(made.run, RANK_1)
    left = [s for s in range(STEPS) if not lost_steps[0] <= s <= lost_steps[1]]
    expected = [record(1, s, 3 + (s >= 12)) for s in left]
    assert [key(r) for r in group.records(0)] == [key(r) for r in expected]
    (lost,) = group.lost
    assert lost.where == f"run.zarr/{RANK_1}/{name.partition('/')[0]}"
    assert lost.steps == lost_steps


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "delete":
            path.unlink()
        case "flip":
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
        case "truncate":
            path.write_bytes(data[:-1])
        case "empty":
            path.write_bytes(b"")


@pytest.mark.parametrize("name", ["zarr.json", "counts/zarr.json", "fqn/c/0", "step/c/0"])
@pytest.mark.parametrize("how", ["delete", "flip", "truncate"])
def test_damaged_metadata_and_labels_never_change_a_value(made: Made, name: str, how: str) -> None:
    damage(made.run.store / RANK_1 / name, how)
    group = StoredGroup(made.run, RANK_1)
    expected = {key(record(1, s, 3 + (s >= 12))) for s in range(STEPS)}
    found = {key(r) for r in group.records(0)}
    assert found <= expected
    # The group's zarr.json holds copies of the arrays' own: either is enough.
    assert found == expected or group.lost


def test_the_group_s_json_lost_the_arrays_own_still_tell(made: Made) -> None:
    damage(made.run.store / RANK_1 / "zarr.json", "flip")
    group = StoredGroup(made.run, RANK_1)
    assert len(list(group.records(0))) == STEPS
    assert [lost.where for lost in group.lost] == [f"run.zarr/{RANK_1}"]


def test_a_chunk_that_is_a_link_is_not_followed(made: Made, tmp_path: Path) -> None:
    path = made.run.store / RANK_1 / "counts/c/0/0/0"
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    group = StoredGroup(made.run, RANK_1)
    assert len(list(group.records(0))) == STEPS - 8
    assert "regular" in group.lost[0].why


def test_a_linked_directory_is_not_followed(made: Made, tmp_path: Path) -> None:
    path = made.run.store / RANK_1 / "counts"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    group = StoredGroup(made.run, RANK_1)
    assert list(group.records(0)) == []
    assert group.lost


@pytest.mark.parametrize("key_", ["../run.json", "/etc/passwd", "a//b", "a/./b", "", "a\x00"])
def test_a_key_cannot_lead_out_of_the_run(tmp_path: Path, key_: str) -> None:
    with pytest.raises(ValueError, match="not a path inside the run"):
        read_regular(tmp_path, key_)


def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chunk")
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path, "chunk")


def forged(made: Made, change: object) -> StoredGroup:
    """Open the group with metadata that its manifest agrees with, as an attacker would make it."""
    path = made.run.store / RANK_1 / "zarr.json"
    document = json.loads(path.read_text())
    change(document)  # type: ignore[operator]
    data = json.dumps(document).encode()
    path.write_bytes(data)
    log = Manifest(manifest_path(made.run, RANK_1))
    log.append(log.state, {"zarr.json": version_of(data)}, durable=False)
    return StoredGroup(made.run, RANK_1)


def arrays_of(document: dict) -> dict:
    return document["consolidated_metadata"]["metadata"]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: arrays_of(d)["counts"].update(codecs=[{"name": "pickle"}]),
        lambda d: arrays_of(d)["counts"].update(data_type="object"),
        lambda d: arrays_of(d)["counts"].update(fill_value=7),
        lambda d: arrays_of(d)["counts"].update(zarr_format=2),
        lambda d: arrays_of(d)["counts"].update(shape=["many"]),
        lambda d: arrays_of(d)["counts"].update(surprise=1),
        lambda d: arrays_of(d)["counts"]["chunk_grid"]["configuration"].update(
            chunk_shape=[1 << 40, 64, 7]
        ),
        lambda d: arrays_of(d).update(counts=17),
    ],
)
def test_an_array_that_the_format_does_not_know_is_refused(made: Made, change: object) -> None:
    group = forged(made, change)
    assert list(group.records(0)) == []
    assert "not an array that format_version 1 allows" in group.lost[0].why


@pytest.mark.parametrize(("version", "word"), [(2, "a newer"), (0, "an older"), (-7, "an older")])
def test_another_format_is_refused_with_its_number(made: Made, version: int, word: str) -> None:
    says = rf"{word} ddpprobe \(format_version {version}, this one reads 1\); pip install"
    with pytest.raises(StoreDamaged, match=says):
        forged(made, lambda d: d["attributes"]["ddpprobe"].update(format_version=version))


def test_an_interrupted_first_commit_is_no_group(made: Made) -> None:
    (made.run.store / RANK_1 / "zarr.json").unlink()
    log = manifest_path(made.run, RANK_1)
    state = Manifest(log).state
    log.unlink()
    Manifest(log).append(state, state.files, durable=False)
    assert not StoredGroup(made.run, RANK_1).exists


def test_groups_and_attempts_are_found(made: Made) -> None:
    assert attempts_of(made.run) == [0]
    names = ("anomalies", "merged", NODE, "rank_00000", "rank_00001")
    assert groups_of(made.run, 0) == [f"attempt_000/{n}" for n in names]
    assert StoredGroup(made.run, "attempt_000/anomalies").anomalies()[0].message == ANOMALY.message


def test_any_name_survives_the_store() -> None:
    for text in ("", "a.b", "\\u0041", "\\", "\x00", "\ud800x", "é\n", "\\ud800"):
        escaped = fmt.escape(text)
        assert fmt.unescape(escaped) == text
        escaped.encode()
        assert "\x00" not in escaped


def test_stock_zarr_reads_the_numbers_without_us(made: Made) -> None:
    array = zarr.open_array(made.run.store, path=f"{RANK_1}/counts", mode="r")
    assert np.array_equal(array[5, :3], record(1, 5).counts)


def test_of_a_chunk_of_labels_those_that_there_are_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has room for thousands: to count those took most of the time of a question."""
    placed: list[int] = []

    def place(*args: Any) -> Any:
        copied = own(*args)
        placed.append(copied.size)
        return copied

    own = regions.place
    monkeypatch.setattr(regions, "place", place)
    made = Made(tmp_path, ranks=1).whole(3)
    made.close()
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    folder.seal()
    folder.close()
    placed.clear()
    assert len(StoredGroup(made.run, "attempt_000/rank_00000").sites() or ()) == 3
    assert placed
    assert max(placed) == 3
