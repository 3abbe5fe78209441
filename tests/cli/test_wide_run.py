"""2,000 modules on 8 ranks, folded: every verb answers, and the report can be looked at."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ddpprobe.cli.main import main
from ddpprobe.detectors.suite import default_suite
from ddpprobe.records.step import COUNTS, FirstBad, Site, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.store.format import SITE_CHUNK_MAX
from ddpprobe.store.writer import StoreWriter

from ..made_runs import NODE, Made, head_merge

RANKS, LAYERS, STEPS = 8, 250, 4
LATE_FROM, BAD_STEP, BAD_RANK = 2, 3, 5  # adapters that are called late; where a NaN comes up
BAD = "model.layers.117.mlp.down_proj"
PARTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
MODULES = [f"model.layers.{i}.{part}" for i in range(LAYERS) for part in PARTS]
Call = Callable[..., tuple[int, str, str]]


def sites(step: int) -> tuple[Site, ...]:
    late = [f"model.layers.{i}.adapter" for i in range(40)] if step >= LATE_FROM else []
    return (
        *(Site(name, "output", dtype="bfloat16") for name in [*MODULES, *late]),
        *(Site(name, "grad_output", dtype="bfloat16") for name in MODULES[::-8]),
        *(
            Site(f"{name}.weight", "grad", "", "replicated", dtype="float32")
            for name in MODULES[3::4]
        ),
        *(Site(f"{n}.bias", "grad", "", "replicated", dtype="float32") for n in MODULES[2::8]),
    )


def record(rank: int, step: int) -> StepRecord:
    table = sites(step)
    counts = np.zeros((len(table), len(COUNTS)), np.int64)
    counts[:, 0], counts[:, 4], counts[:, 5:] = 4096, np.arange(len(table)) % 100 + step, 1
    noise = np.array([s.fqn.endswith("k_proj.bias") for s in table])
    rms = np.where(noise, 1e-12 * 100.0**step, 10.0 ** (np.arange(len(table)) % 7 / 3 - 2))
    rms *= 1 + 1e-3 * rank
    bad = FirstBad(step, 0, "backward", 1062, rank, BAD, "grad_output", nan=3, numel=4096)
    is_bad = (rank, step) == (BAD_RANK, BAD_STEP)
    if is_bad:
        counts[table.index(Site(BAD, "grad_output", dtype="bfloat16")), 1] = bad.nan
    return StepRecord(
        0, step, (rank,), 10**18 + step * 10**9, sites=table, counts=counts,
        values=np.stack([-2 * rms, 2 * rms, 0 * rms, 4096 * rms**2], axis=1),
        scalars={
            rank: {"loss": 2.0 - step / 9, "grad_norm_local": 1.0 + rank, "forward_seconds": 0.1}
        },
        first_bad=bad if is_bad else None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Made(tmp_path_factory.mktemp("wide") / "run", ranks=RANKS)
    suite = default_suite()
    for step in range(STEPS):
        parts = [record(rank, step) for rank in range(RANKS)]
        made.write(parts)
        merged = head_merge(parts)
        made.tell(framing.RECORD, merged)
        for anomaly in suite.update(merged):
            made.tell(framing.ANOMALY, anomaly)
    writer = StoreWriter(made.close(), NODE, durable=False)
    writer.seal()
    writer.close()
    assert writer.damaged == {}
    assert not list((made.path / "journal").rglob("*.wal"))
    return made.path


@pytest.fixture
def call(path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    def ask(verb: str, *words: object) -> tuple[int, str, str]:
        code = main([verb, str(path), *map(str, words)])
        return (code, *capsys.readouterr())

    return ask


def test_info_counts_all_of_it(call: Call) -> None:
    code, out, err = call("info", "--json")
    told = json.loads(out)
    assert (code, err, told["sites"], told["lost"]) == (0, "", len(sites(STEPS)), [])
    assert len(sites(0)) > SITE_CHUNK_MAX  # the second shard is not full
    assert [r["sampled"] for r in told["attempts"][0]["ranks"]] == [STEPS] * RANKS


def test_the_first_cause_is_found_and_a_replay_says_the_same(call: Call) -> None:
    code, out, err = call("anomalies")
    assert (code, err) == (1, "")
    assert f"rank {BAD_RANK}  {BAD}:grad_output" in out.splitlines()[0]
    code, out, err = call("replay")
    assert (code, err) == (0, "")
    assert "the recorded verdict exactly" in out


def test_trace_shows_sites_from_both_ends_of_the_model(call: Call) -> None:
    code, out, err = call("trace", "--site", f"{BAD}*", "--rank", BAD_RANK, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert [s["kind"] for s in told["series"]] == ["output", "grad_output", "grad"]
    assert told["series"][1]["nonfinite"] == [0, 0, 0, 3]
    late = json.loads(call("trace", "--site", "model.layers.39.adapter", "--json")[1])
    assert late["steps"] == list(range(LATE_FROM, STEPS))


def test_all_of_it_is_intact_and_equal_to_a_copy(call: Call, path: Path) -> None:
    code, out, err = call("verify")
    assert (code, err) == (0, "")
    assert out.startswith("all intact")
    code, out, err = call("compare", path)
    assert (code, err) == (0, "")
    assert (
        f"compared: {STEPS} sampled steps from 0 to {STEPS - 1}, {len(sites(STEPS))} sites" in out
    )
    assert "is compared is equal" in out or "is compared differs" in out


def test_top_puts_the_broken_module_first_and_noise_last(call: Call) -> None:
    code, out, err = call("top", "--json")
    order = [s["site"] for s in json.loads(out)["sites"]]
    assert (code, err, order[0]) == (0, "", f"{BAD}:grad_output")
    assert all(site.endswith("k_proj.bias:grad") for site in order[-LAYERS:])


def test_every_export_holds_what_its_format_can_hold(call: Call, tmp_path: Path) -> None:
    asked = {"csv": "2:", "parquet": "2:", "openmetrics": "3", "blocks": "3"}
    rows = sum(len(sites(step)) for step in range(2, STEPS))
    made = {form: tmp_path / form for form in asked}
    for form, steps in asked.items():
        code, _, err = call("export", "--format", form, "--steps", steps, "-o", made[form])
        left_out = err.count("beyond the 5000 of a node were left out") == err.count("\n")
        assert (code, left_out) == (0, True), err
    with made["csv"].open() as file:
        kinds = [row["kind"] for row in csv.DictReader(file)]
    assert len(kinds) - kinds.count("scalar") == rows
    assert pq.read_metadata(made["parquet"]).num_rows == len(kinds)
    assert made["openmetrics"].read_text().endswith("# EOF\n")
    assert list(made["blocks"].iterdir())


def test_the_report_is_drawn_and_no_heavier_than_a_browser_takes(
    call: Call, tmp_path: Path
) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "no chromium on the PATH: `make test` installs it"
    page = tmp_path / "page.html"
    code, _, err = call("report", "-o", page)
    assert (code, err) == (0, "")
    assert page.stat().st_size < 8 << 20
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={tmp_path / 'profile'}", "--no-first-run", "--disable-extensions",
             "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1280,3600",
             "--virtual-time-budget=20000", "--dump-dom"]  # fmt: skip
    done = subprocess.run(
        [chromium, *words, page.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    dom = done.stdout
    places = re.findall(r'data-plot="([\w-]+)"', dom)
    assert {"timeline", "map", "ranks"} <= {*places}
    assert f'data-drawn="{len(places)}"' in dom
    assert "data-errors" not in dom
    assert f"gradient of the output of {BAD} on rank {BAD_RANK} at step {BAD_STEP}" in dom
    # 2,040 rows do not fit: neighbours share one, but for the modules around the first cause.
    names = re.findall(r">(model\.layers\.[\w.]+(?: \+\d+)?)</text>", dom)
    assert 20 < len(names) < 200
