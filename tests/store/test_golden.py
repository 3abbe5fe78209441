"""Stores that were written before are read as ever, and what is written changes with its number."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr

from ddpprobe.cli.main import main
from ddpprobe.daemon.__main__ import main as daemon
from ddpprobe.errors import RunError
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.paths import FORMAT_VERSION

from .. import golden_store as golden
from ..conftest import handlers_kept

BUMP = (
    "what is written is not what it was, so the reader of an older ddpprobe may misread it. If "
    "that is meant: raise FORMAT_VERSION in ddpprobe/rundir/paths.py, keep reading the version "
    "before, "
    "and run `python -m tests.golden_store` (docs/reference/store-format.md, Versions)"
)


@pytest.fixture(scope="module", params=paths.readable(), ids="v{}".format)
def version(request: pytest.FixtureRequest) -> int:
    """Every format version that is read."""
    return int(request.param)


@pytest.fixture(scope="module")
def run(version: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden store of a version."""
    return golden.unpack(version, tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def told(version: int) -> dict[str, Any]:
    """What is in it."""
    found = json.loads((golden.HOME / f"store-v{version}" / "values.json").read_text())
    return dict(found)


def test_a_golden_store_is_read_as_it_was_written(run: Path, told: dict[str, Any]) -> None:
    found = golden.values(open_run(run))
    assert found.keys() == told.keys()
    for name, value in told.items():
        assert found[name] == value, name


def test_a_golden_store_is_whole(run: Path) -> None:
    report = verify(open_run(run))
    assert report.damage == []
    assert report.files > 200
    assert report.frames > 30


def test_what_was_left_unsealed_is_finished_by_the_daemon_of_today(tmp_path: Path) -> None:
    run = golden.unpack(FORMAT_VERSION, tmp_path)
    before, (left,) = golden.values(open_run(run)), open_run(run).info()["unsealed"]
    words = ["--dir", str(run), "--node", left["node"], "--listen", "127.0.0.1:0", "--after"]
    with handlers_kept():
        assert daemon(words) == 0
    assert open_run(run).info()["unsealed"] == []
    assert verify(open_run(run)).damage == []
    after = golden.values(open_run(run))
    for name in ("stats", "identity", "series", "loss", "captures", "tensors", "expired", "lost"):
        assert after[name] == before[name], name
    for name in ("anomalies", "readings"):  # it judges and reads the machine, too
        assert all(one in after[name] for one in before[name]), name


def test_stock_zarr_and_xarray_read_the_same_numbers(run: Path, told: dict[str, Any]) -> None:
    tree = xarray.open_datatree(run / "run.zarr", engine="zarr", consolidated=False)
    for name in ("merged", "rank_00001"):
        data = tree[f"attempt_000/{name}"].dataset
        rank = None if name == "merged" else 1
        kept = data["order"].values >= 0
        expected = told["series"][f"0 {rank} min"]
        rows = np.flatnonzero(kept.any(axis=1))
        assert data["step"].values[rows].tolist() == expected["steps"]
        column = data["value_stat"].values.tolist().index("min")
        smallest = data["values"].values[rows][:, :, column]
        assert golden._plain(smallest.tolist()) == expected["values"]
    group = zarr.open_group(run / "run.zarr" / "attempt_000/rank_00001", mode="r")
    counts = np.asarray(group["counts"])
    numel = told["series"]["0 1 numel"]
    assert golden._plain(np.where(counts[8:, :, 5] > 0, counts[8:, :, 0], np.nan).tolist()) == [
        [None if x is None else float(x) for x in row] for row in numel["values"]
    ]
    value = zarr.open_array(
        run / "run.zarr", path="attempt_000/captures/step_0000000012/t00000/value", mode="r"
    )
    assert np.asarray(value).ravel().tolist() == told["tensors"]["0 12"]  # bits of bfloat16
    assert told["anomalies"][-1]["detector"] == "nonfinite"
    verdicts = tree["attempt_001/anomalies"].dataset
    assert verdicts["message"].values.tolist() == ["3 NaN in blocks.1.mlp"]


def _members(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]


def _lines(log: bytes) -> list[Any]:
    """Return the lines of a manifest; lengths and checksums of chunks are their compressor's."""
    lines = []
    for frame in framing.iter_frames(log):
        line = frame.json()
        files = {k: v if v is None or "/c/" not in k else "any" for k, v in line["files"].items()}
        lines.append({**line, "files": files})
    return lines


def _compare_form(then: dict[str, bytes], now: dict[str, bytes]) -> None:
    """Fail where a file is another one than it was, but for what a compressor is free to do."""
    assert sorted(now) == sorted(then), BUMP
    for name, data in then.items():
        form: Callable[[bytes], object] = bytes  # journals and packs: byte by byte
        if name.endswith(".json"):
            form = json.loads
        elif name.startswith("manifest/"):
            form = _lines
        elif "/c/" in name:
            continue  # of chunks the values are compared
        assert form(now[name]) == form(data), f"{name}: {BUMP}"


@pytest.fixture(scope="module")
def then() -> dict[str, bytes]:
    """The files of the golden store of the current version."""
    home = golden.HOME / f"store-v{FORMAT_VERSION}"
    assert home.is_dir(), f"no golden store of version {FORMAT_VERSION}: {BUMP}"
    return _members((home / "run.tar.xz").read_bytes())


def test_what_is_written_today_has_the_form_of_the_golden_store(
    then: dict[str, bytes], tmp_path: Path
) -> None:
    run = golden.make(tmp_path / "run").path
    files = sorted(path for path in run.rglob("*") if path.is_file())
    _compare_form(then, {path.relative_to(run).as_posix(): path.read_bytes() for path in files})
    told = golden.HOME / f"store-v{FORMAT_VERSION}" / "values.json"
    assert golden.values(open_run(run)) == json.loads(told.read_text()), BUMP


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("run.zarr/attempt_000/merged/counts/zarr.json", b"bitshuffle", b"shuffle"),
        ("run.zarr/attempt_000/node_0000/zarr.json", b"sample_json", b"sample_text"),
        ("run.zarr/zarr.json", b'"format_version"', b'"version"'),
        ("captures/001/node_0000/rank_00000/step_0000000005.pack", b"world_size", b"world_sise"),
        ("journal/001/node_0000/daemon/00000000.wal", b"resident_bytes", b"resident_pages"),
    ],
)
def test_a_change_of_what_is_written_is_noticed(
    then: dict[str, bytes], name: str, old: bytes, new: bytes
) -> None:
    assert old in then[name]
    with pytest.raises(AssertionError, match="raise FORMAT_VERSION"):
        _compare_form(then, {**then, name: then[name].replace(old, new)})
    with pytest.raises(AssertionError, match="raise FORMAT_VERSION"):
        _compare_form(then, {k: v for k, v in then.items() if k != name})
    _compare_form(then, dict(then))


def test_a_reader_takes_the_current_version_and_the_one_before() -> None:
    assert list(paths.readable(1)) == [1]
    assert list(paths.readable(2)) == [1, 2]
    assert list(paths.readable(7)) == [6, 7]
    assert FORMAT_VERSION in paths.readable()


def _with_version(run: Path, copy: Path, text: str) -> Path:
    copy.mkdir()
    for path in run.iterdir():
        if path.name != "run.json":
            (copy / path.name).symlink_to(path)
    said = json.loads((run / "run.json").read_text())
    said.pop("format_version")
    (copy / "run.json").write_text(json.dumps(said)[:-1] + f', "format_version": {text}}}')
    return copy


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (str(FORMAT_VERSION + 1), 2, "a newer ddpprobe"),
        (str(1 << 62), 2, "pip install -U ddpprobe"),
        (str(paths.readable()[0] - 1), 2, "an older ddpprobe"),
        ("-3", 2, "(format_version -3, this one reads 1)"),
        ('"one"', 3, "format_version 'one'); move it away"),
        ("null", 3, "format_version None); move it away"),
        ("true", 3, "format_version True); move it away"),
        ("1.5", 3, "format_version 1.5); move it away"),
        ('"\\u001b[2J"', 3, r"format_version '\x1b[2J'); move it away"),
    ],
)
def test_another_version_is_refused_with_what_came_and_what_to_do(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, says: str
) -> None:
    other = _with_version(run, tmp_path / "other", text)
    with pytest.raises(RunError) as caught:
        open_run(other)
    assert says in str(caught.value)
    assert caught.value.exit_code == code
    for verb in ("info", "verify", "anomalies"):
        assert main([verb, str(other)]) == code
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1
