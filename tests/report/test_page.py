"""The report: one HTML file, looked at in Chromium, of runs of every sort."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpprobe.cli.main import main
from ddpprobe.reader.run import open_run
from ddpprobe.records.histogram import BINS
from ddpprobe.records.step import KINDS, Anomaly, FirstBad, Site, StepRecord
from ddpprobe.report import page, tables
from ddpprobe.report.columns import NEAR, StepColumns
from ddpprobe.report.heat import KIND_WORDS, LAST, grouped
from ddpprobe.report.numbers import Labels, Numbers, table_of
from ddpprobe.report.rows import RunSites, SiteRows, stat_of
from ddpprobe.report.story import gather
from ddpprobe.rundir import framing
from ddpprobe.rundir.paths import DirectoryLock

from ..made_runs import NODE, Made, head_merge

EVIL = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
)
ODD = "--bad\x1b[31m\u202eevil\u2028&amp;'\"<b>bold</b>${7*7}{{7*7}}%{x}\ud800"
BAD_STEP = 31


def sites(names: list[str]) -> tuple[Site, ...]:
    kinds = {"output": "local", "grad_output": "local"}
    own = [Site(n, kind, "", at, dtype="float32") for kind, at in kinds.items() for n in names]
    return (*own, *(Site(f"{n}.weight", "grad", "", "replicated") for n in names))


def record(
    rank: int, step: int, table: tuple[Site, ...], bad: FirstBad | None = None, attempt: int = 0
) -> StepRecord:
    """A step in which each site's rms is its own; on the guilty rank one site holds a NaN."""
    counts = np.zeros((len(table), 7), np.int64)
    counts[:, 0], counts[:, 4], counts[:, 5:] = 64, 3, 1
    rms = 10.0 ** (np.arange(len(table)) % 5 - 2)
    values = np.stack([-2 * rms, 2 * rms, 0 * rms, 64 * rms**2], axis=1)
    loss, norm = 2 + np.exp(-step / 20), 1.0 + rank % 2
    if bad and rank == bad.rank:
        row = next(i for i, s in enumerate(table) if (s.fqn, s.kind) == (bad.fqn, bad.kind))
        counts[row, 1], loss = bad.nan, np.nan
    return StepRecord(
        attempt, step, (rank,), 10**18 + step * 10**9, sites=table, counts=counts, values=values,
        scalars={rank: {"loss": float(loss), "grad_norm_local": norm, "forward_seconds": 0.1,
                        "backward_seconds": 0.2 + 0.2 * (rank == 1)}},
        first_bad=bad if bad and rank == bad.rank else None,
    )  # fmt: skip


def make(
    path: Path, steps: int = 40, ranks: int = 2, names: tuple[str, ...] = ("a", "b.c", "b.d"),
    bad: FirstBad | None = None, attempts: int = 1, told: bool = True,
) -> Made:  # fmt: skip
    table = sites(list(names))
    for attempt in range(attempts):
        made = Made(path, ranks=ranks, attempt=attempt)
        for step in range(steps):
            own = bad if bad and (attempt, step) == (attempts - 1, bad.step) else None
            parts = [record(r, step, table, own, attempt) for r in range(ranks)]
            made.write(parts)
            if told:
                made.tell(framing.RECORD, head_merge(parts))
                made.tell(framing.SAMPLE, reading(step, ranks))
            if told and own:
                made.tell(framing.ANOMALY, verdict(own, attempt))
        if attempt < attempts - 1:
            made.close()
    return made


def reading(step: int, ranks: int) -> dict[str, Any]:
    host = {"cpu_ratio": 0.5, "memory_available_bytes": 1e9, "memory_total_bytes": 4e9}
    own = {"resident_bytes": 1e9, "cpu_seconds": float(step)}
    by_rank = {str(rank): own for rank in range(ranks)}
    return {"time_ns": 10**18 + step * 10**9, "host": host, "ranks": by_rank}


def verdict(bad: FirstBad, attempt: int = 0) -> Anomaly:
    return Anomaly(
        "nonfinite", "page", bad.step, bad.micro, bad.rank, bad.fqn, bad.kind, bad.phase,
        first_cause=True, message=f"{bad.nan} NaN of {bad.numel} elements",
        values={"nan": float(bad.nan)}, sampled=True, attempt=attempt,
        wall_time_ns=10**18 + bad.step * 10**9,
    )  # fmt: skip


def bad_at(module: str, rank: int = 1, kind: str = "output") -> FirstBad:
    return FirstBad(BAD_STEP, 0, "forward", 1, rank, module, kind, nan=3, numel=64)


@dataclass(frozen=True)
class Page:
    """What `ddpprobe report` made of a run: its exit code, what it said, and the page."""

    code: int
    out: str
    err: str
    html: str

    @property
    def text(self) -> str:
        """All text a reader sees, in one line."""
        reader = Reader()
        reader.feed(self.html)
        return " ".join(" ".join(reader.words).split())


class Reader(HTMLParser):
    """Collects what stands outside of scripts and styles, and every address in the page."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self._silent = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent = tag in {"script", "style"}
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        self.addresses += [v or "" for k, v in attrs if k in {"src", "href", "action", "data"}]

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)


Report = Callable[..., Page]


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    def write(run: Path, *more: str) -> Page:
        path = tmp_path / "page.html"
        path.unlink(missing_ok=True)
        code = main(["report", str(run), "-o", str(path), *more])
        out, err = capsys.readouterr()
        return Page(code, out, err, path.read_text() if path.exists() else "")

    return write


# ---- the verdict, of runs of every sort


def test_the_page_begins_with_the_first_cause(report: Report, tmp_path: Path) -> None:
    page = report(make(tmp_path / "r", bad=bad_at("b.c")).close().path)
    assert (page.code, page.err) == (0, "")
    headline = (
        "First non-finite tensor: output of b.c on rank 1 at step 31, micro-batch 0, in the "
        "forward pass"
    )
    assert f"First cause {headline} page 3 NaN of 64 elements" in page.text
    assert "The loss is first not finite at step 31, on rank 1." in page.text
    assert "To look closer: ddpprobe trace" in page.text
    assert "<title>made: First non-finite tensor: output of b.c on" in page.html[:5000]


def test_a_healthy_run_of_one_rank_says_in_how_much_nothing_was_found(
    report: Report, tmp_path: Path
) -> None:
    page = report(make(tmp_path / "r", ranks=1).close().path)
    assert page.code == 0
    assert "No anomalies in 40 recorded steps" in page.text
    assert "guilty" not in page.text.lower()


def test_a_crashed_run_without_a_daemon_has_the_same_verdict(
    report: Report, tmp_path: Path
) -> None:
    made = make(tmp_path / "r", bad=bad_at("b.c"), told=False)
    page = report(made.close(cleanly=False).path)
    assert "output of b.c on rank 1 at step 31" in page.text
    assert "no last word" in page.text
    assert "unknown, without a seal" in page.text
    assert 'data-plot="host"' not in page.html  # nothing was read: no empty plot of it


def test_a_run_with_a_warning_only_shows_it_and_no_first_cause(
    report: Report, tmp_path: Path
) -> None:
    made = make(tmp_path / "r")
    warned = replace(verdict(bad_at("b.c")), level="warn", first_cause=False, message="odd")
    made.tell(framing.ANOMALY, warned)
    page = report(made.close().path)
    assert "Verdict No page, 1 weaker anomaly in 40 recorded steps" in page.text
    assert "step 31, rank 1: b.c:output: odd" in page.text


def test_warnings_that_are_not_listed_are_counted(report: Report, tmp_path: Path) -> None:
    made = make(tmp_path / "r")
    for step in range(30, 37):
        odd = replace(verdict(bad_at("b.c")), detector="grad_spike", level="warn", step=step)
        odd = replace(odd, first_cause=False, message="odd")
        made.tell(framing.ANOMALY, odd)
    page = report(made.close().path)
    assert "No page, 7 weaker anomalies in 40 recorded steps" in page.text
    assert "step 35, rank 1: b.c:output: odd and 1 more: all anomalies" in page.text


def test_a_run_that_recorded_nothing_still_has_a_page(report: Report, tmp_path: Path) -> None:
    page = report(make(tmp_path / "r", steps=0).close().path)
    assert page.code == 4
    assert "No step was recorded" in page.text
    assert "nothing is held of any rank" in page.err


def test_several_attempts_are_told_apart(report: Report, tmp_path: Path) -> None:
    page = report(make(tmp_path / "r", bad=bad_at("b.d"), attempts=2).close().path)
    assert "attempt 1" in page.text
    steps = next(f for f in figures(page)["map"])["data"][0]["x"]
    assert steps[0].startswith("attempt 0: ")
    assert steps[-1] == "attempt 1: 39"


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_run_under_way_is_shown_in_green_only_while_nothing_is_wrong(
    report: Report, tmp_path: Path, is_bad: bool
) -> None:
    made = make(tmp_path / "r", bad=bad_at("b.d") if is_bad else None)
    lock = DirectoryLock(made.run.lock)
    assert lock.acquire()
    page = report(made.path)
    made.close()
    assert f'<span class="badge running {"bad" if is_bad else "good"}">running</span>' in page.html
    # From the beginning of a word only: the page has words of a million characters.
    (rule,) = re.findall(r"(?<!\S)(\S*badge\.running\S*) \{ color: var\(--good\)", page.html)
    assert rule == ".badge.running.good"
    lock.release()


def test_a_damaged_run_lists_in_the_page_what_is_lost(report: Report, tmp_path: Path) -> None:
    from ddpprobe.store.writer import StoreWriter

    run = make(tmp_path / "r", steps=24).close()
    writer = StoreWriter(run, NODE, block=8, durable=False)
    writer.seal()
    writer.close()
    for chunk in (run.store / "attempt_000" / "merged" / "scalars" / "c" / "1").rglob("*"):
        if chunk.is_file():
            chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    page = report(run.path)
    assert page.code == 3
    assert "This run is damaged" in page.text
    assert "merged/scalars, steps 8 to 15" in page.text
    assert "merged/scalars, steps 8 to 15" in page.err
    assert "in 16 recorded steps" in page.text  # what is lost is not counted as healthy
    sizes = figures(page)["map"][0]["data"][0]
    assert "8 to 15 lost" in sizes["x"]  # and is a gap, not just shorter
    assert np.isnan(values(sizes["z"])[:, sizes["x"].index("8 to 15 lost")]).all()


def test_json_says_where_the_page_lies(report: Report, tmp_path: Path) -> None:
    page = report(make(tmp_path / "r").close().path, "--json")
    told = json.loads(page.out)
    assert Path(told["file"]).read_text() == page.html
    assert told["bytes"] == len(page.html.encode())
    assert (told["run"], told["records"], told["anomalies"], told["lost"]) == ("made", 40, 0, [])


@pytest.mark.parametrize("where", ["", "no/such/directory/page.html"])
def test_a_file_that_cannot_be_written_is_wrong_use(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "r", steps=1).close()
    assert main(["report", str(run.path), "-o", str(tmp_path / where)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_goes_to_standard_output(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "r", steps=1).close()
    monkeypatch.setattr(tables, "when", lambda _: "now")  # the second in which it is made
    assert main(["report", str(run.path), "-o", "page.html"]) == 0
    capsysbinary.readouterr()
    assert main(["report", str(run.path), "-o", "-"]) == 0
    assert capsysbinary.readouterr() == ((tmp_path / "page.html").read_bytes(), b"")
    assert main(["report", str(run.path), "-o", "-", "--json"]) == 2
    out, err = capsysbinary.readouterr()
    assert (out, b"give -o FILE.html" in err) == (b"", True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "r"]


# ---- what is drawn


def figures(page: Page) -> dict[str, list[dict[str, Any]]]:
    _, _, rest = page.html.partition('<script type="application/json" id="figures">')
    return dict(json.loads(rest.partition("</script>")[0]))


def values(array: dict[str, str]) -> np.ndarray:
    import base64

    found = np.frombuffer(base64.b64decode(array["bdata"]), f"<{array['dtype']}")
    return found.reshape([int(n) for n in array["shape"].split(",")])


def test_a_tree_that_is_not_installed_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(page, "version", version)
    Made(tmp_path / "run", ranks=1).whole(2).close()
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0
    assert "unknown" in (tmp_path / "page.html").read_text()


def test_the_map_holds_a_gap_where_nothing_was_observed_and_a_mark_where_a_nan_was(
    report: Report, tmp_path: Path
) -> None:
    made = Made(tmp_path / "r", ranks=1)
    table = sites(["a", "b"])
    for step in range(10):
        own = record(0, step, table, replace(bad_at("b", 0), step=5) if step == 5 else None)
        if step == 3:
            own.counts[0] = 0, 0, 0, 0, 0, 1, 0  # tapped, and never seen
            own.values[0] = np.inf, -np.inf, 0, 0
        if step == 4:
            own.values[0] = 0  # seen, and zero everywhere
        made.write([own])
    page = report(made.close().path)
    sizes, bad = figures(page)["map"][0]["data"]
    assert sizes["y"] == ["a", "b"]
    z = values(sizes["z"])
    assert np.flatnonzero(np.isnan(z[0])).tolist() == [3]
    assert z[0, 4] == np.float32(sizes["zmin"])  # zero is the lowest colour, and no gap
    assert np.argwhere(np.isfinite(values(bad["z"]))).tolist() == [[1, 5]]
    assert values(bad["customdata"])[1, 5] == 3


def test_a_slow_rank_stands_out(report: Report, tmp_path: Path) -> None:
    page = report(make(tmp_path / "r", ranks=4).close().path)
    backward = next(f for f in figures(page)["ranks"] if f["title"] == "time in backward")
    ratio = values(backward["data"][0]["customdata"])
    assert backward["data"][0]["y"] == [f"rank {r}" for r in range(4)]
    np.testing.assert_allclose(ratio[:, 0], [1, 2, 1, 1], rtol=1e-6)
    assert "0.4 2.00 x" in page.text
    # Before the numbers, which are wider than the page: on which machine to look.
    assert re.search(r"rank\s+host\s+status\s+steps", page.text)


def test_readings_are_the_same_from_the_journal_and_from_the_store(tmp_path: Path) -> None:
    from ddpprobe.store.writer import StoreWriter

    made = make(tmp_path / "r", steps=6)
    before = list(open_run(made.path).readings())
    run = made.close()
    writer = StoreWriter(run, NODE, durable=False)
    writer.seal()
    writer.close()
    shutil.rmtree(run.path / "journal", ignore_errors=True)
    after = list(open_run(run.path).readings())
    assert len(before) == 6
    assert after == before
    assert after[2].ranks[1]["cpu_seconds"] == 2.0


# ---- any number of steps and sites in a bounded number of cells


def test_any_number_of_steps_fits_into_a_bounded_number_of_columns() -> None:
    table, most, steps, moment = RunSites(), 20, 3000, 1111
    columns: StepColumns[SiteRows] = StepColumns(most, [(0, moment)])
    where = sites(["a"])[:1]
    for step in range(steps):
        row = record(0, step, where)
        row.counts[0, 1] = step == 777  # one NaN, nowhere near the moment
        columns.add(0, step, SiteRows.of(row, table))
    found = list(columns)
    assert len(found) <= 2 * most + 3 * NEAR + 2
    assert [c.first for c in found[1:]] == [c.last + 1 for c in found[:-1]]  # each step once
    assert (found[0].first, found[-1].last) == (0, steps - 1)
    alone = {c.first for c in found if c.steps == 1}
    assert alone >= {*range(moment - NEAR, moment + NEAR + 1), *range(steps - NEAR, steps)}
    bad = stat_of([c.content for c in found], [[0]], "nonfinite")[0]
    assert [c.covers(0, 777) for c in found] == (bad > 0).tolist()
    numel = stat_of([c.content for c in found], [[0]], "numel")[0]
    assert numel.tolist() == [64 * c.steps for c in found]


def test_ranges_of_a_rank_hold_through_any_merge_and_what_is_not_finite_is_counted() -> None:
    labels, columns = Labels(), StepColumns[Numbers](2)
    given = np.random.default_rng(1).normal(size=(100, 2))
    given[17, 1] = np.nan
    for step, row in enumerate(given):
        scalars = {rank: {"loss": float(value)} for rank, value in enumerate(row)}
        columns.add(0, step, Numbers.of(StepRecord(0, step, (0, 1), 0, scalars=scalars), labels))
    found = list(columns)
    table = table_of([c.content for c in found], labels, "loss")
    pieces = [given[c.first : c.last + 1] for c in found]
    assert max(c.steps for c in found) > 10
    np.testing.assert_array_equal(table.low, [np.nanmin(p, axis=0) for p in pieces])
    np.testing.assert_array_equal(table.high, [np.nanmax(p, axis=0) for p in pieces])
    np.testing.assert_allclose(table.mean, [np.nanmean(p, axis=0) for p in pieces])
    np.testing.assert_array_equal(table.bad, [np.isnan(p).sum(axis=0) for p in pieces])


def test_a_named_module_has_an_image_in_which_every_element_of_a_step_is_counted(tmp_path) -> None:
    made = make(tmp_path / "run", told=False)
    binned, parts = np.array([1]), []
    for step in range(40, 300):
        bins = np.zeros((1, BINS), np.int64)
        bins[0, [20, 90]] = 1, 60 - step % 3
        parts.append(replace(record(0, step, sites(["a", ODD])), binned=binned, bins=bins))
    made.write(parts)
    story = gather(open_run(made.close().path))
    [found], columns = story.histograms
    assert found.fqn == ODD
    assert len(columns) < 260
    assert sum(c.content.bins.sum() for c in columns) == sum(p.bins.sum() for p in parts)
    [drawn] = page.figures_of(story)["histograms"]
    assert "(below 0.0625:" in drawn["title"]
    text = page.render(story)
    assert "Histograms over steps" in text
    assert "<b>bold</b>" not in text


def test_sites_share_lines_but_never_the_guilty_one() -> None:
    lines = grouped(range(1000), {500}, most=100)
    assert [500] in lines
    assert [p for line in lines for p in line] == list(range(1000))
    assert len(lines) <= 103


def test_every_kind_has_a_plain_name_and_the_weights_come_before_what_tells_less() -> None:
    assert set(KIND_WORDS) == set(KINDS)
    assert not any("_" in words for words in KIND_WORDS.values())
    assert list(KIND_WORDS)[-len(LAST) :] == list(LAST)


def test_the_page_of_a_large_run_stays_small(tmp_path: Path) -> None:
    from ddpprobe.report.heat import heat_maps

    story = gather(open_run(make(tmp_path / "r", steps=1).close().path))
    story.table, columns = RunSites(), StepColumns(80)
    table, rng = sites([f"layers.{i}.block" for i in range(500)]), np.random.default_rng(0)
    for step in range(400):
        row = record(0, step, table)
        row.counts[:, 1] = rng.integers(0, 2, len(table))
        columns.add(0, step, SiteRows.of(row, story.table))
    story.maps = list(columns)
    assert len(json.dumps(heat_maps(story))) < 4_000_000


# ---- a stranger's names


def console(log: str) -> list[str]:
    """Messages of the page in Chromium's log."""
    return re.findall(r'CONSOLE[^"]*"(.*?)", source', log, re.DOTALL)


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The page of a run with hostile names, in Chromium: its DOM when it is drawn, and the log.

    A script and an image are put into the page beside it, as if escaping had failed.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail("no chromium on the PATH: `make test` installs it (Debian: chromium)")
    path = tmp_path_factory.mktemp("evil")
    made = make(path / "run", names=("a", EVIL, ODD), bad=bad_at(EVIL))
    warned = replace(verdict(bad_at(ODD)), detector=ODD, level="warn", first_cause=False)
    made.tell(framing.ANOMALY, warned)
    run, page = made.close(), path / "page.html"
    assert main(["report", str(run.path), "-o", str(page)]) == 0
    planted = "<script>document.title = 'planted'</script><img src='https://127.0.0.1:1/x.png'>"
    page.write_text(page.read_text().replace("</footer>", f"</footer>{planted}"))
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={path / 'profile'}", "--no-first-run", "--disable-extensions",
             "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--log-level=0",
             "--window-size=1280,2000", "--virtual-time-budget=20000", "--dump-dom"]  # fmt: skip
    done = subprocess.run(
        [chromium, *words, page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_chromium_draws_every_plot_and_complains_of_nothing_but_what_was_planted(
    looked_at: tuple[str, str],
) -> None:
    dom, log = looked_at
    places = re.findall(r'data-plot="([\w-]+)"', dom)
    assert places == ["timeline", "map", "history-0", "ranks", "host"]
    assert f'data-drawn="{len(places)}"' in dom
    assert "data-errors" not in dom
    assert dom.count('class="js-line"') > 10
    assert dom.count('href="data:image/png;base64,') >= 2 + 1  # sizes, what is broken; ranks
    buttons = set(re.findall(r'data-title="([^"]+)"', dom))
    assert "Download plot as a PNG" in buttons
    assert not [b for b in buttons if "hare" in b or "loud" in b]  # plotly offers to upload it
    refused = console(log)
    assert len(refused) == 2, refused
    assert all("Content Security Policy" in message for message in refused)


def test_hostile_names_are_text_and_a_planted_script_does_not_run(
    looked_at: tuple[str, str],
) -> None:
    dom, _ = looked_at
    reader = Reader()
    reader.feed(dom)
    text = " ".join(reader.words)
    assert f"output of {EVIL} on rank 1 at step 31" in text
    assert "<title>made: First non-finite tensor" in dom
    assert "--bad?[31m?evil?&amp;'\"<b>bold</b>${7*7}{{7*7}}%{x}?" in text
    assert not set("\x1b\u202e\u2028") & set(text)
    assert dom.count("<img src") == 1  # the planted one


def test_the_page_names_no_address(report: Report, tmp_path: Path) -> None:
    page = report(make(tmp_path / "r", names=(EVIL, ODD), bad=bad_at(EVIL)).close().path)
    reader = Reader()
    reader.feed(page.html)
    assert {a for a in reader.addresses if not a.startswith("#")} == {"data:,"}
    head = html.unescape(page.html[:2000])
    assert "default-src 'none'; script-src 'sha256-" in head
    assert head.count("unsafe-inline") == 1  # styles, as plotly makes them; no script
    assert reader.handlers == []
