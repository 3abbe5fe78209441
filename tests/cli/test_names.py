"""Names of 300 characters: tables stay tables, and each name still tells which it is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.cli.main import main
from ddpprobe.cli.names import MOST, shortened
from ddpprobe.cli.top_frame import frame
from ddpprobe.reader.live.live_view import LiveView, SiteNow
from ddpprobe.records.step import Site

from ..made_runs import Made, record

WRAPPED = "_fsdp_wrapped_module._checkpoint_wrapped_module." * 6
LONG = [f"{WRAPPED}decoder.layers.{i}.mlp.down_proj" for i in (0, 1)]
ODD = [f"{side}.{WRAPPED}proj" for side in ("encoder", "decoder")]  # alike at the end
parts = st.lists(st.sampled_from(["a", "b.", "…", "layers.", "x" * 30]), max_size=12).map("".join)


@given(st.lists(parts, max_size=8), st.integers(4, 40))
def test_no_two_names_become_equal_and_what_is_short_stays(names: list[str], most: int) -> None:
    found = shortened(names, most)
    assert len(set(zip(names, found, strict=True))) == len(set(names)) == len(set(found))
    for name, short in zip(names, found, strict=True):
        assert short == name if len(name) <= most else len(short) <= most or short == name


def test_the_end_that_tells_stays_and_the_beginning_where_only_it_differs() -> None:
    short = shortened([*LONG, "head:output", *ODD])
    assert [s.rpartition(".decoder")[2] for s in short[:2]] == [
        f".layers.{i}.mlp.down_proj" for i in (0, 1)
    ]
    assert short[2] == "head:output"
    assert [s[:8] for s in short[3:]] == ["encoder.", "decoder."]
    assert all(s.endswith("proj") and len(s) <= MOST for s in (*short[:2], *short[3:]))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Made(tmp_path_factory.mktemp("long") / "run", ranks=1)
    sites = tuple(Site(n, "output", dtype="float32") for n in [*LONG, *ODD])
    made.write([record(0, step, 4, sites=sites) for step in range(3)])
    return made.close().path


def test_trace_shows_a_table_that_can_be_read_and_json_whole_names(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(path), "--site", "*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 120
    assert {line.split()[2].rpartition(".decoder")[2] for line in lines if "layers" in line} == {
        f".layers.{i}.mlp.down_proj:output" for i in (0, 1)
    }
    assert len({line.split()[2] for line in lines[1:]}) == 4
    assert main(["trace", str(path), "--site", "*", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [s["fqn"] for s in told["series"]] == [*LONG, *ODD]
    assert main(["trace", str(path), "--site", "*", "--plot"]) == 0
    assert "down_proj:output" in capsys.readouterr().out


def test_compare_shows_where_in_a_table_that_can_be_read(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path / "run", ranks=1)
    sites = tuple(Site(n, "output", dtype="float32") for n in [*LONG, *ODD])
    for step in range(3):
        one = record(0, step, 4, sites=sites)
        made.write([replace(one, values=one.values * (1 + (step > 1)))])
    assert main(["compare", str(path), str(made.close().path)]) == 0
    headline, *rest = capsys.readouterr().out.splitlines()
    assert LONG[0] in headline
    rows = [line for line in rest if "proj" in line]
    assert len(rows) >= 4
    assert max(map(len, rows)) < 160


def test_top_keeps_the_end_of_a_name_in_a_narrow_terminal() -> None:
    sites = tuple(SiteNow(f"{name}:grad", 1.0, math.nan) for name in LONG)
    lines = [text for _, text in frame(LiveView("r", "live", "/r", 1, (), sites), 80, 24)]
    shown = [line for line in lines if "down_proj" in line]
    assert [line[-24:] for line in shown] == [f"ers.{i}.mlp.down_proj:grad" for i in (0, 1)]
    assert max(map(len, lines)) <= 80
