"""A run as data: datasets in memory and lazy, data frames, pictures; the same numbers in all."""

from __future__ import annotations

import os
import pickle
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray
from matplotlib import colors

import ddpprobe
from ddpprobe.errors import RunNotFound, StoreDamaged, UnknownSeries
from ddpprobe.reader.lazy_dataset import lazy_dataset
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.run import Run, open_run
from ddpprobe.records.step import FORMULAS, Site, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.store.manifest import Losses, Lost
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.retention import RetentionLimits
from ddpprobe.store.row_reader import RowReader
from ddpprobe.store.writer import StoreWriter

from ..made_runs import NODE, Made, head_merge, record, sites
from .test_run import STATES, bring

STEPS, FOLDED = 50, 20
NAMES = ("nonfinite", *FORMULAS)


def unobserved(made: StepRecord) -> StepRecord:
    """Return a record of which the second site did not arrive, and the first has no finite one."""
    counts, values = made.counts.copy(), made.values.copy()
    counts[1], values[1] = 0, (np.inf, -np.inf, 0, 0)
    counts[1, 5] = 1  # tapped
    counts[0, 1] = counts[0, 0]  # all of them NaN
    return replace(made, counts=counts, values=values)


@pytest.fixture(scope="module", params=STATES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks; a site is new at a step, one is not observed at another; a daemon has a gap."""
    made = Made(tmp_path_factory.mktemp(request.param))
    for step in range(STEPS):
        parts = [record(r, step, 3 + (step >= 20)) for r in range(2)]
        parts = [unobserved(p) if step == 7 else p for p in parts]
        made.write(parts)
        if not 30 <= step < 35:
            made.tell(1, head_merge(parts))
    bring(made, request.param)
    return open_run(made.path)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_lazy_dataset_holds_the_same_as_the_one_in_memory(run: Run, rank: int | None) -> None:
    lazy, whole = run.to_xarray(rank, chunks={}), run.to_xarray(rank)
    assert all(lazy[name].chunks is not None for name in (*NAMES, "counts", "scalars"))
    xarray.testing.assert_identical(lazy.compute(), whole)


def test_a_statistic_is_the_same_number_everywhere(run: Run) -> None:
    dataset, frame, rows = run.to_xarray(), run.to_pandas(), run.to_polars()
    frame, rows = frame[frame.kind != "scalar"], rows.filter(kind="output")
    for stat in NAMES:
        series = run.series("*", stat)
        columns = [site.fqn for site in series.sites]
        found = dataset.sel(site=[str(site) for site in series.sites])[stat]
        assert np.array_equal(found, series.values, equal_nan=True)
        wide = frame.pivot_table(index="step", columns="fqn", values=stat, dropna=False, sort=False)
        assert np.array_equal(wide[columns].astype(float), series.values, equal_nan=True)
        spread = rows.pivot(on="fqn", index="step", values=stat).sort("step")
        numbers = spread.select(columns).cast(float).to_numpy()
        assert np.array_equal(numbers, series.values, equal_nan=True)


def test_who_asks_for_zeros_ratio_is_told_our_word_first(tmp_path: Path) -> None:
    run = open_run(Made(tmp_path).whole(2).close().path)
    with pytest.raises(UnknownSeries, match="choose one of zero_ratio, "):
        run.series("*", "zeros_ratio")


def test_the_model_itself_is_named_as_it_may_be_typed(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    root = Site("", "output", dtype="float32")
    made.write(replace(record(0, step, 2), sites=(root, sites(1)[0])) for step in range(2))
    run = open_run(made.close().path)
    with pytest.raises(UnknownSeries, match=r"nearest: \(root\), blocks\.0\.mlp"):
        run.series("layer.7", "rms", 0)
    assert run.series("(root)", "rms", 0).sites == run.series("", "rms", 0).sites == (root,)


def test_what_is_absent_is_missing_and_not_a_number_of_the_run(run: Run) -> None:
    frame, columns = run.to_pandas(steps=slice(7, 8)), run.to_polars(steps=slice(7, 8))
    second = frame[frame.fqn == "blocks.1.mlp"]
    assert second.numel.isna().all()
    assert second.tapped.notna().all()
    assert columns.filter(fqn="blocks.1.mlp")["numel"].null_count() == 1
    assert columns.filter(kind="scalar", fqn="loss")["value"].to_list() == [0.125, 0.125]
    times = columns["wall_time"].cast(int).to_list()
    assert set(times) == set(frame.wall_time.astype(np.int64)) == {10**18 + 7}


def test_frames_of_no_step_have_all_columns(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.writer(0)
    run = open_run(made.close().path)
    assert list(run.to_pandas()) == run.to_polars().columns
    assert not len(run.to_xarray(chunks={}).step)


def test_nothing_of_the_store_is_read_before_a_lazy_array_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path).whole(STEPS)
    bring(made, "sealed")
    read: list[tuple[int, int]] = []
    kept = RowReader.statistic

    def noted(self: RowReader, stat: str, start: int, stop: int, sites: int) -> object:
        read.append((start, stop))
        return kept(self, stat, start, stop, sites)

    monkeypatch.setattr(RowReader, "statistic", noted)
    monkeypatch.setattr(RowReader, "read", None)  # counts, aggregates and scalars are not needed
    dataset = open_run(tmp_path).to_xarray(chunks={})
    assert not read
    last = dataset.rms.isel(step=-1).compute(scheduler="synchronous")
    assert read == [(48, 50)]
    assert np.isfinite(last).all()


def test_a_lazy_dataset_is_reduced_in_less_memory_than_it_would_fill(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    made.write(record(0, step, 500) for step in range(200))
    bring(made, "sealed")  # in blocks of 8 steps
    run = open_run(tmp_path)
    expected = run.series("*", "rms", 0).values.mean(axis=0)
    lazy = run.to_xarray(0, chunks={})
    tracemalloc.start()
    try:
        found = lazy.rms.mean("step").compute(scheduler="synchronous")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.allclose(found, expected)
    assert peak < lazy.nbytes / 6


def test_a_run_that_grows_while_it_is_opened_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path).whole(64)
    folder = StoreWriter(made.run, NODE, block=8, durable=False)
    folder.fold()
    before = RowReader(tmp_path, "attempt_000/merged").sizes()
    kept, grown = MergedReader.group, []

    def grows(self: MergedReader, attempt: int, name: str) -> StoredGroup | None:
        if not grown:
            grown.append(name)
            for step in range(64, 128):  # with a site, and a scalar, that are new
                parts = [record(r, step, 5) for r in range(2)]
                parts = [replace(p, scalars={r: {"new": 1.0}}) for r, p in enumerate(parts)]
                made.write(parts)
                made.tell(framing.RECORD, head_merge(parts))
            folder.fold()
        return kept(self, attempt, name)

    monkeypatch.setattr(MergedReader, "group", grows)
    run = open_run(tmp_path)
    lazy = lazy_dataset(MergedReader(made.run), 0, None)
    assert grown
    xarray.testing.assert_identical(lazy.compute(), run.to_xarray())
    assert (before["site"], lazy.sizes["site"]) == (3, 5)
    folder.close()
    made.close()


def test_a_lazy_dataset_can_be_cut_anew_and_sent_to_another_process(tmp_path: Path) -> None:
    made = Made(tmp_path).whole(STEPS)
    bring(made, "sealed")
    dataset = open_run(tmp_path).to_xarray(chunks={"step": 30})
    assert dataset.rms.chunks == ((30, 20), (3,))
    by_site = open_run(tmp_path).to_xarray(chunks={"site": 2})
    assert by_site.rms.chunks[1] == (2, 1)
    assert by_site.scalars.chunks[0] == (8, 8, 8, 8, 8, 8, 2)
    assert by_site.fqn.chunks is None
    assert open_run(tmp_path).to_xarray(chunks="auto").rms.chunks == ((50,), (3,))
    with pytest.raises(ValueError, match="no dimension sites in chunks=: there are step, site"):
        open_run(tmp_path).to_xarray(chunks={"sites": 2})
    again = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(again.rms, open_run(tmp_path).to_xarray().rms)


def test_a_damaged_block_raises_when_it_is_read_and_no_other(tmp_path: Path) -> None:
    made = Made(tmp_path).whole(STEPS)
    bring(made, "sealed")
    dataset = open_run(tmp_path).to_xarray(chunks={})
    (tmp_path / "run.zarr/attempt_000/merged/counts/c/1/0/0").write_bytes(b"no shard")
    assert np.isfinite(dataset.rms.isel(step=0)).all()
    with pytest.raises(StoreDamaged, match=r"rows 8 to 15 cannot be read: .*or leave chunks= out"):
        dataset.rms.isel(step=8).compute()


def test_what_retention_took_is_in_no_lazy_dataset(tmp_path: Path) -> None:
    made = Made(tmp_path).whole(STEPS)
    bring(made, "sealed")
    before = open_run(tmp_path).to_xarray(chunks={})
    limits = RetentionLimits(1)  # the newest block of each group always stays
    StoreWriter(made.run, NODE, block=8, durable=False, limits=limits).seal()
    run = open_run(tmp_path)
    lazy, whole = run.to_xarray(chunks={}), run.to_xarray()
    assert lazy.step.values.tolist() == [48, 49]
    xarray.testing.assert_identical(lazy.compute(), whole)
    with pytest.raises(StoreDamaged, match=r"rows 0 to 7 cannot be read: .*expired"):
        before.rms.isel(step=0).compute()


def test_the_old_name_of_the_aggregates_still_answers_and_says_so(run: Run) -> None:
    dataset = run.to_xarray().sel(step=3)
    with pytest.warns(DeprecationWarning, match="calls this variable 'aggregates'"):
        old = dataset["values"]
    assert np.array_equal(old, dataset.aggregates, equal_nan=True)
    assert "values" not in dataset
    assert dataset[["rms"]].rms.dims == ("site",)


def test_few_sites_are_lines_and_many_an_image_with_bad_steps_marked(tmp_path: Path) -> None:
    made = Made(tmp_path, ranks=1)
    for step in range(10):
        made.write([unobserved(record(0, step, 20)) if step == 4 else record(0, step, 20)])
    run = open_run(made.close(cleanly=False).path)
    lines = run.plot("blocks.[012].mlp", "rms", steps=slice(2, None)).axes[0]
    drawn = [line for line in lines.lines if line.get_label().startswith("blocks")]
    series = run.series("blocks.[012].mlp", "rms", steps=slice(2, None))
    assert [line.get_label() for line in drawn] == [str(site) for site in series.sites]
    assert np.array_equal(drawn[2].get_ydata(), series.values[:, 2])
    assert drawn[1].get_xdata().tolist() == [2, 3, 5, 6, 7, 8, 9]  # at step 4 it is unobserved
    (mark,) = [line for line in lines.lines if colors.same_color(line.get_color(), "red")]
    assert list(mark.get_xdata()) == [4, 4]
    figure = run.plot("*", "std")
    assert figure._repr_png_().startswith(b"\x89PNG")  # as a notebook shows it
    picture = figure.axes[0]
    assert picture.collections[0].get_array().shape == (20, 10)
    assert [(x, y) for x, y in picture.lines[0].get_xydata()] == [(4, 0)]
    with pytest.raises(UnknownSeries, match="nothing to draw"):
        run.plot("*", "rms", steps=slice(10**6, None))


def test_what_is_read_shows_itself_in_a_line_and_stays_what_it_is(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    for step in range(0, 200, 2):
        made.write([record(rank, step, 40) for rank in range(2)])
    run = open_run(made.close().path)
    found = run.series("*", "rms")
    named = "blocks.0.mlp:output, blocks.1.mlp:output, blocks.2.mlp:output, ..."
    assert repr(found) == f"Series('rms', 40 sites ({named}) x 100 steps, 0 to 198)"
    one = run.series("blocks.0.mlp", "rms", steps=slice(0, 1))
    assert repr(one) == "Series('rms', 1 site (blocks.0.mlp:output) x 1 step, 0)"
    assert repr(run.scalars("loss")) == "Scalars('loss', ranks 0-1 x 100 steps, 0 to 198)"
    assert repr(run.histograms()) == "Histograms(0 sites x 0 steps)"
    assert replace(one, stat="std").sites == one.sites
    assert np.array_equal(pickle.loads(pickle.dumps(found)).values, found.values)


def test_of_much_that_is_lost_a_notebook_shows_the_first(tmp_path: Path) -> None:
    lost = [Lost(f"run.zarr/{number}", None, "is missing") for number in range(100)]
    few, many = Losses(lost[:2]), Losses(lost)
    assert repr(few) == repr(lost[:2])
    assert repr(many) == f"{repr(lost[:3])[:-1]}, ... 100 in all]"
    assert (few, many) == (lost[:2], lost)
    assert type(open_run(Made(tmp_path / "run").whole(3).close().path).lost) is Losses


def test_a_notebook_shows_what_ls_says_and_no_html_of_a_stranger(tmp_path: Path) -> None:
    made = Made(tmp_path / "<b>run").whole(4)
    made.close()
    text = open_run(made.path)._repr_html_()
    assert "PAGE step 3 rank 0 blocks.1.mlp:output nonfinite" in text
    assert "&lt;b&gt;run" in text
    assert "<b>" not in text


def test_open_without_a_run_opens_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDPPROBE_DIR", raising=False)
    with pytest.raises(RunNotFound, match="no run below ddpprobe-runs"):
        ddpprobe.open()
    for name in ("a", "b"):
        Made(tmp_path / "ddpprobe-runs" / name).whole(1).close()
    newest = ddpprobe.runs()[0]
    assert ddpprobe.open().path == newest.path
    os.environ["DDPPROBE_DIR"] = str(tmp_path / "ddpprobe-runs" / "a")
    try:
        assert ddpprobe.open().path.name == "a"
    finally:
        del os.environ["DDPPROBE_DIR"]


@pytest.mark.parametrize(
    ("library", "extra", "method"),
    [
        ("pandas", "pandas", "to_pandas"),
        ("polars", "polars", "to_polars"),
        ("dask", "dask", "to_xarray"),
        ("matplotlib", "plot", "plot"),
    ],
)
def test_without_a_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, extra: str, method: str
) -> None:
    made = Made(tmp_path, ranks=1).whole(2)
    made.close()
    for name in [library, *sys.modules]:  # whether a test before has imported it or not
        if name.split(".")[0] == library:
            monkeypatch.setitem(sys.modules, name, None)
    for name in ("lazy_dataset", "series_plot"):
        monkeypatch.delitem(sys.modules, f"ddpprobe.reader.{name}", raising=False)
    given = {"to_xarray": {"chunks": {}}, "plot": {"site_glob": "*", "stat": "rms"}}
    with pytest.raises(ImportError, match=rf"pip install 'ddpprobe\[{extra}\]'"):
        getattr(open_run(tmp_path), method)(**given.get(method, {}))


def test_a_statistic_that_is_not_recorded_is_refused_with_what_there_is(run: Run) -> None:
    with pytest.raises(UnknownSeries, match=r"no site .* has a histogram.*histograms=\["):
        run.series("*", "near_zero_ratio")
    with pytest.raises(UnknownSeries, match="'zeros_ratio': choose one of zero_ratio"):
        run.series("*", "zeros_ratio")
