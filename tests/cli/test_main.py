"""The command line: verdicts, exit codes and one-line errors, on run directories of every sort."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpprobe.cli import commands, main, output
from ddpprobe.cli.verbs import VERBS, exits
from ddpprobe.records.events import ExitEvent
from ddpprobe.records.step import COUNTS, FirstBad, Site, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir, make_dir, write_json

Call = Callable[..., tuple[int, str, str]]
EVIL = "blocks.1\x1b[31m\x07\u202e"
SITES = (
    Site("blocks.0.mlp", "output"),
    Site(EVIL, "output"),
    Site("blocks.0.mlp", "grad_output"),
    Site("blocks.0.mlp.weight", "grad", placement="replicated"),
)
BAD = FirstBad(30, 0, "backward", 2, 1, "blocks.0.mlp", "grad_output", "", 3, 0, 0, 64)


def record(rank: int, step: int, bad: FirstBad | None) -> StepRecord:
    counts = np.zeros((len(SITES), len(COUNTS)), np.int64)
    counts[:, COUNTS.index("numel")] = 64
    counts[:, -2:] = 1
    if step == 5:
        counts[0, [0, -1]] = 0  # the first site was not observed at step 5
    if bad and rank == bad.rank:
        counts[2, COUNTS.index("nan")] = bad.nan
    values = np.tile([-1.0, 1.0, 0.0, 64.0 * (1 + step)], (len(SITES), 1))
    return StepRecord(
        0, step, (rank,), 10**9 * step, sites=SITES, counts=counts, values=values,
        # Healthy ranks take turns at the largest loss.
        scalars={rank: {"loss": 1.0 + (rank + step) % 2 / 8, "grad_norm_local": 1.0}},
        first_bad=bad if bad and rank == bad.rank else None,
    )  # fmt: skip


def make_run(
    path: Path, bad: FirstBad | None = None, ranks: int = 2, steps: int = 40, *,
    closed: bool = True, first: int = 0,
) -> Path:  # fmt: skip
    """A run that only its ranks wrote down: journals, no daemon, no store."""
    run = RunDir(make_dir(path))
    write_json(
        run.run_json,
        {"format_version": 1, "run_id": "r1", "name": "tiny", "world_size": ranks, "nodes": 1,
         "created_ns": 10**18, "every": 1, "wrapper": "ddp", "torch": "2.13.0", "backend": "gloo",
         "hostname": "node\x1b[2Ja"},
    )  # fmt: skip
    for rank in range(ranks):
        meta = {"rank": rank, "local_rank": rank, "world_size": ranks, "local_world_size": ranks,
                "node": "node_0000", "node_index": 0, "attempt": 0, "pid": 2**30 + rank,
                "pid_start": 0.0, "hostname": "a", "device": "cpu", "wrapper": "ddp",
                "backend": "gloo", "torch": "2.13.0", "run_id": "r1", "name": "tiny", "every": 1,
                "started_ns": 10**18, "head": True, "resume_step": 0}  # fmt: skip
        writer = JournalWriter(run.rank_journal(0, "node_0000", rank), meta)
        for step in range(first, steps):
            writer.append_record(record(rank, step, bad if bad and step == bad.step else None))
        if closed:
            writer.append_json(
                framing.LIFE, {"event": "closed", "status": "ok", "sampled": steps - first}
            )
        writer.close()
    return path


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return make_run(tmp_path / "healthy")


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    return make_run(tmp_path / "sick", BAD)


def test_a_healthy_run_has_no_anomalies(call: Call, healthy: Path) -> None:
    assert call("anomalies", healthy) == (0, "no anomalies in 40 sampled steps\n", "")


def test_the_verdict_is_one_line_and_a_page_exits_with_1(call: Call, sick: Path) -> None:
    code, out, err = call("anomalies", sick)
    assert (code, err) == (1, "")
    assert out.split("\n")[0].split("  ") == [
        "PAGE",
        "step 30 micro 0",
        "rank 1",
        "blocks.0.mlp:grad_output",
        "backward",
        "nonfinite: 3 NaN of 64 elements (first cause)",
    ]
    assert out.split("\n")[-2] == "judged: 40 sampled steps"


def test_anomalies_as_json_are_exactly_the_contract(call: Call, sick: Path) -> None:
    code, out, _ = call("anomalies", sick, "--json")
    assert code == 1
    found = json.loads(out)
    assert found.pop("judged")["complete"]
    assert found.pop("end") == {
        "state": "ended", "ranks": [], "how": "", "step": None, "phase": None,
        "message": "every rank came to its end",
    }  # fmt: skip
    assert found == {
        "run": "tiny",
        "format_version": 1,
        "anomalies": [
            {
                "detector": "nonfinite", "level": "page", "step": 30, "micro": 0, "rank": 1,
                "module": "blocks.0.mlp", "kind": "grad_output", "phase": "backward",
                "first_cause": True, "message": "3 NaN of 64 elements",
                "values": {"nan": 3, "pos_inf": 0, "neg_inf": 0, "numel": 64}, "sampled": True,
            }
        ],
    }  # fmt: skip


def test_a_healthy_run_as_json_is_an_empty_list(call: Call, healthy: Path) -> None:
    code, out, _ = call("anomalies", healthy, "--json")
    assert (code, json.loads(out)["anomalies"]) == (0, [])


def test_what_followed_is_indented_below_its_cause(call: Call, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", BAD, closed=False)
    run = RunDir(path)
    writer = JournalWriter(run.daemon_journal(0, "node_0000"), {"role": "daemon", "world_size": 2})
    for order, rank in enumerate((1, 0)):  # the order was seen: rank 1 was dead before rank 0
        how = "SIGKILL" if order else "SIGSEGV"
        ended = ExitEvent(
            rank=rank,
            how=how,
            order=order,
            witness="daemon",
            time_ns=10**18 + order,
            step=39,
            state="forward",
        )
        writer.append_event(ended)
    writer.close()
    code, out, _ = call("anomalies", path)
    lines = out.splitlines()
    assert code == 1
    assert [line[:6] for line in lines] == ["crashe", "PAGE  ", "  PAGE", "  INFO", "judged"]
    assert "rank_lost: rank 1 died (SIGSEGV) in step 39" in lines[2]
    assert "first cause" not in lines[2]


def test_the_new_kinds_of_verdict_are_one_line_each(call: Call, tmp_path: Path) -> None:
    run = RunDir(make_dir(tmp_path / "parted"))
    write_json(run.run_json, {"format_version": 1, "name": "parted", "world_size": 3})
    for rank in range(3):
        writer = JournalWriter(run.rank_journal(0, "node_0000", rank), {"world_size": 3})
        for step in range(300):
            made = record(rank, step, None)
            if step >= 20:
                gone = np.array([s.fqn != EVIL for s in SITES])
                made.counts[~gone, -1] = 0
            torn = {("fc.weight", ""): {int(step >= 150 and rank == 1): 1 << rank}}
            scaled = {rank: {"loss_scale": 2.0 ** min(0, 200 - step)}}
            writer.append_record(replace(made, digests=torn, scalars=scaled, skipped=step > 200))
        writer.append_json(framing.LIFE, {"event": "closed", "status": "ok"})
        writer.close()
    code, out, err = call("anomalies", run.path)
    assert (code, err) == (1, "")
    *lines, judged = [" ".join(line.split()) for line in out.splitlines()]
    assert judged == "judged: 300 sampled steps"
    assert [line.partition(": ")[0] for line in lines] == [
        "PAGE step 150 micro 0 rank 1 fc.weight:param step desync",
        "PAGE step 208 micro 0 rank - - backward loss_scale",
        "WARN step 24 micro 0 rank - blocks.1?[31m??:output forward coverage",
    ]


def test_a_level_that_there_is_not_is_refused_with_those_there_are(call, tmp_path: Path) -> None:
    code, out, err = call("anomalies", tmp_path, "--level", "error")
    assert (code, out) == (2, "")
    assert "invalid choice: 'error' (choose from" in err


def test_level_hides_what_is_below_and_does_not_change_the_exit_code(
    call: Call, tmp_path: Path
) -> None:
    path = make_run(tmp_path / "run", steps=33)
    writer = JournalWriter(RunDir(path).rank_journal(0, "node_0000", 2), {"world_size": 3})
    skipped = StepRecord(0, 33, (2,), 0, first_bad=FirstBad(33, 0, "backward", 0, 2), skipped=True)
    writer.append_record(skipped)
    writer.append_json(framing.LIFE, {"event": "closed", "status": "ok", "sampled": 1})
    writer.close()
    assert call("anomalies", path)[1].startswith("INFO")
    code, out, _ = call("anomalies", path, "--level", "page")
    assert code == 0
    assert out.startswith("no anomalies at level page or above (1 below) in ")


def test_info_says_what_ran(call: Call, healthy: Path) -> None:
    code, out, err = call("info", healthy)
    assert (code, err) == (0, "")
    for text in ("tiny", "2 ranks on 1 node,", "every 1 step\n", "0 to 39", "40 of 40", "100 %"):
        assert text in out
    code, out, _ = call("info", healthy, "--json")
    assert json.loads(out)["world_size"] == 2


def test_a_run_without_a_wrapper_is_said_to_have_none(call: Call, healthy: Path) -> None:
    file = RunDir(healthy).run_json
    write_json(file, {**json.loads(file.read_bytes()), "wrapper": "none"})
    assert "2 ranks on 1 node, no wrapper, gloo, torch" in call("info", healthy)[1]


def tell_overhead(path: Path, ratios: list[float]) -> None:
    """Let each rank's last heartbeat say what ddpprobe adds to its steps."""
    for rank, ratio in enumerate(ratios):
        writer = HeartbeatWriter(RunDir(path).heartbeat(0, "node_0000", rank))
        writer.overhead_ratio = ratio
        writer.beat(step=39, micro=0, state=STATES.index("closed"), steps=40, skipped=0, sampled=40,
                    phase_seconds=(1.0, 1.0, 1.0, 1.0), probe_seconds=0.0)  # fmt: skip
        writer.close()


@pytest.mark.parametrize(
    ("ratios", "line", "told"),
    [
        ([0.0042, 0.013], "at least 1.3 % of a step's own time (rank 1, the most)", (0.013, 1)),
        ([1.32, 0.5], "at least 130 % of a step's own time (rank 0, the most)", (1.32, 0)),
        ([0.02, float("nan")], "at least 2 % of a step's own time (rank 0, the most)", (0.02, 0)),
        ([float("nan")] * 2, "", None),
    ],
)
def test_info_says_what_ddpprobe_costs_the_run(
    call: Call, healthy: Path, ratios: list[float], line: str, told: tuple[float, int] | None
) -> None:
    assert "overhead" not in call("info", healthy)[1]
    tell_overhead(healthy, ratios)
    out = call("info", healthy)[1]
    assert re.findall(r"^overhead +(.*)$", out, re.MULTILINE) == ([line] if line else [])
    found = json.loads(call("info", healthy, "--json")[1])
    assert found["overhead"] == (told and {"ratio": told[0], "rank": told[1]})


def test_info_says_the_budget_beside_the_overhead(call: Call, healthy: Path) -> None:
    journal = RunDir(healthy).rank_journal(0, "node_0000", 0)
    writer = JournalWriter(journal, {}, first_segment=1, first_seq=10**6)
    said = {"event": "budget", "step": 0, "every": 1, "budget": 0.01, "ratio": None}
    writer.append_json(framing.LIFE, said)
    writer.close()
    assert re.search(
        r"^overhead +not measured yet, budget 1 %$", call("info", healthy)[1], re.MULTILINE
    )
    tell_overhead(healthy, [0.004, 0.008])
    line = r"^overhead +0.8 % of a step's own time \(rank 1, the most\), budget 1 %$"
    assert re.search(line, call("info", healthy)[1], re.MULTILINE)


def tell_sites(path: Path, rank: int, **facts: object) -> None:
    """Let a rank say what it watches, as it does when that has changed."""
    directory = RunDir(path).rank_journal(0, "node_0000", rank)
    writer = JournalWriter(directory, {}, first_segment=1, first_seq=10**6)
    event = {"event": "sites", "expected": 4, "observed": 4, "unsupported": {}, "silent": []}
    writer.append_json(framing.LIFE, {**event, "expected": 9})
    writer.append_json(framing.LIFE, {**event, **facts})
    writer.close()


def test_info_says_what_each_rank_sees_and_what_it_does_not(call: Call, healthy: Path) -> None:
    tell_sites(
        healthy, 0, expected=7, observed=5, silent=["head\x1b", ""], unsupported={"qint8": 2}
    )
    tell_sites(healthy, 1, expected=7, observed=5, silent=["head\x1b", ""])
    code, out, err = call("info", healthy)
    assert (code, err) == (0, "")
    assert out.count("  5 of 7  closed") == 2
    assert "\nranks 0-1: never called: head?, (root)\n" in out
    assert "\nrank 0: not supported: qint8 (2)\n" in out
    first, second = json.loads(call("info", healthy, "--json")[1])["attempts"][0]["ranks"]
    assert (first["sites_expected"], first["sites_observed"]) == (7, 5)
    assert (first["unsupported"], second["unsupported"]) == ({"qint8": 2}, {})
    assert first["silent"] == ["head\x1b", ""]


def test_info_lists_where_infinities_do_no_harm(call: Call, healthy: Path) -> None:
    for rank in (0, 1):
        directory = RunDir(healthy).rank_journal(0, "node_0000", rank)
        writer = JournalWriter(directory, {}, first_segment=1, first_seq=10**6)
        said = {"fqn": "blocks.0.mask\x1b", "kind": "output", "values": ["-Inf"], "step": 2}
        writer.append_json(framing.LIFE, {"event": "steady", **said})
        writer.close()
    code, out, _ = call("info", healthy)
    assert code == 0
    line = "ranks 0-1: infinite without harm since step 2: blocks.0.mask?:output (-Inf)"
    assert f"\n{line}\n" in out


def tell_orders(path: Path) -> None:
    """Let the head order captures and a stop, and the ranks say what they did."""
    directory = RunDir(path).daemon_journal(0, "node_0000")
    head = JournalWriter(directory, {"node": "node_0000", "role": "daemon"})
    names = ["blocks.0.mlp", "head"]
    for index, (action, start, stop, modules, reason, cause) in enumerate([
        ("capture", 31, 34, names, "nonfinite: 3 NaN\x1b[2J", "capture:x"),
        ("stop", 33, 34, [], "3 NaN", "stop:x"),
        ("capture", 36, 37, [], "trigger: looks odd", "request/1"),
        ("capture", 38, 39, names, "trigger: asked for", "trigger/1/0"),
    ]):  # fmt: skip
        order = {"number": index, "action": action, "start": start, "stop": stop}
        said = {**order, "modules": modules, "reason": reason, "cause": cause}
        head.append_json(framing.LIFE, {"event": "order", **said})
    head.close()
    for rank in (0, 1):
        journal = RunDir(path).rank_journal(0, "node_0000", rank)
        writer = JournalWriter(journal, {}, first_segment=1, first_seq=10**6)
        late = {"event": "late_order" if rank else "order", "number": 1, "action": "stop"}
        writer.append_json(framing.LIFE, {**late, "step": 34, "start": 33, "stop": 34})
        for step, reason in ((3, "capture"), (7, "capture"), (31, "x"), (32, "x"), (36, "x")):
            if (rank, step) != (1, 36):
                kept = {"event": "captured", "step": step, "bytes": 1024, "reason": reason}
                writer.append_json(framing.LIFE, kept)
        if rank:
            own = {"event": "captured", "step": 30, "bytes": 512, "reason": "nonfinite"}
            writer.append_json(framing.LIFE, own)
        writer.close()


def test_info_says_what_was_captured_and_on_whose_word(call: Call, healthy: Path) -> None:
    assert "install(capture" not in call("info", healthy)[1]
    tell_orders(healthy)
    code, out, err = call("info", healthy)
    assert (code, err) == (0, "")
    rows = [" ".join(line.split()) for line in out.splitlines()[-7:]]
    assert rows == [
        "steps ranks kept modules why",
        "capture 31 to 33 2 of 2 4.0 KiB at 2 steps 2 page: nonfinite: 3 NaN?[2J",
        "stop 33 1 of 2, 1 heard too late - all page: 3 NaN",
        "capture 36 1 of 2 1.0 KiB at 1 step all user: trigger: looks odd",
        "capture 38 0 of 2 0 B at 0 steps 2 script: trigger: asked for",
        "capture 3 to 7 2 of 2 4.0 KiB at 2 steps - install(capture=...)",
        "capture 30 1 of 2 512 B at 1 step - the first bad module",
    ]
    orders = json.loads(call("info", healthy, "--json")[1])["attempts"][0]["orders"]
    assert [o["by"] for o in orders[::4]] == ["page", "install"]
    assert orders[0]["ranks"] == [0, 1]
    assert (orders[1]["heard"], orders[1]["late"]) == ([0], [1])


def test_info_of_a_run_that_never_said_what_it_sees_shows_no_number(call: Call, sick: Path) -> None:
    assert cells(call("info", sick)[1])[-1][-4:] == ["100", "%", "-", "closed"]
    rank = json.loads(call("info", sick, "--json")[1])["attempts"][0]["ranks"][0]
    assert (rank["sites_expected"], rank["silent"]) == (None, [])


def test_names_from_a_store_cannot_move_the_terminal(call: Call, healthy: Path) -> None:
    for words in (("info", healthy), ("trace", healthy, "--site", "blocks.1*")):
        _, out, _ = call(*words)
        assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert "blocks.1?[31m??:output" in call("trace", healthy, "--site", "*", "--steps", 0)[1]


def cells(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_trace_prints_the_series_as_a_table(call: Call, healthy: Path) -> None:
    code, out, _ = call("trace", healthy, "--site", "blocks.0.mlp:output", "--steps", "3:6")
    assert code == 0
    assert cells(out) == [
        ["attempt", "step", "site", "rms", "nonfinite"],
        ["0", "3", "blocks.0.mlp:output", "2", "0"],
        ["0", "4", "blocks.0.mlp:output", "2.23607", "0"],
        ["0", "5", "blocks.0.mlp:output", "-", "-"],
    ]


def test_trace_says_which_rows_are_one_rank_s_and_not_the_tensor_s(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("local", "partial", "unknown", "replicated")
    sites = [replace(s, placement=p) for s, p in zip(SITES, kinds, strict=True)]
    monkeypatch.setattr(sys.modules[__name__], "SITES", tuple(sites))
    run = make_run(tmp_path / "tp", steps=2)
    out = call("trace", run, "--site", "*", "--steps", 0)[1].splitlines()[1:]
    assert [line.count("one rank's)") for line in out] == [0, 1, 1, 0]
    assert "(partial, one rank's)" in out[1]
    assert "(unknown, one rank's)" in call("trace", run, "--site", "*:grad_output", "--plot")[1]


def test_trace_reads_one_rank_or_all_merged(call: Call, sick: Path) -> None:
    glob = ("--site", "blocks.0.mlp:grad_output", "--steps", 30, "--stat", "numel")
    assert cells(call("trace", sick, *glob)[1])[1][3:] == ["128", "3"]
    assert cells(call("trace", sick, *glob, "--rank", 0)[1])[1][3:] == ["64", "0"]


def test_trace_as_json_has_null_where_nothing_was_observed(call: Call, healthy: Path) -> None:
    words = ("trace", healthy, "--site", "blocks.0.mlp:*", "--steps", "4:6", "--json")
    code, out, _ = call(*words)
    found = json.loads(out)
    assert code == 0
    assert found["steps"] == [4, 5]
    by_site = {s["site"]: s["values"] for s in found["series"]}
    assert by_site["blocks.0.mlp:output"][1] is None
    assert by_site["blocks.0.mlp:grad_output"][1] == pytest.approx(6**0.5)


def test_trace_plots_without_colours_into_a_pipe(call: Call, healthy: Path) -> None:
    code, out, _ = call("trace", healthy, "--site", "blocks.0.mlp:output", "--plot")
    assert code == 0
    assert "blocks.0.mlp:output" in out
    assert "\x1b" not in out
    assert len(out.splitlines()) > 10


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--site", "blocks.0.mpl:output"), "nearest: blocks.0.mlp:output"),
        (("--site", "*", "--stat", "norms"), "choose one of norm, "),
        (("--site", "blocks.0.mlp:output", "--scalar", "loss"), "not allowed with"),
        (("--scalar", "los"), "no scalar matches 'los': this run has loss, grad_norm_local"),
        (("--stat", "rms"), "--stat is of sites"),
        (("--scalar", "loss", "--steps", "900:"), "they reach from 0 to 39; nearest: 39"),
        (("--site", "*", "--rank", "7"), "no rank 7 in this run; it has 0, 1"),
        (("--site", "*", "--steps", "900:"), "they reach from 0 to 39"),
        (("--site", "*", "--steps", "9:3"), "B must be greater than A"),
        (("--site", "*", "--steps", "x"), "expected A:B"),
    ],
)
def test_trace_says_what_there_is_instead(
    call: Call, healthy: Path, words: tuple[str, ...], answer: str
) -> None:
    code, out, err = call("trace", healthy, *words)
    assert (code, out) == (2, "")
    assert answer in err


def missing(path: Path) -> Path:
    return path / "nothing"


def empty(path: Path) -> Path:
    return make_dir(path / "empty")


def foreign(path: Path) -> Path:
    (path / "holiday.jpg").write_bytes(b"\xff\xd8")
    return path


def a_file(path: Path) -> Path:
    (path / "train.py").write_text("import torch\n")
    return path / "train.py"


def half_written(path: Path) -> Path:
    (path / "run.json").write_text('{"format_ver')
    return path


def no_object(path: Path) -> Path:
    (path / "run.json").write_text("[1]")
    return path


@pytest.mark.parametrize("verb", ["info", "anomalies", "trace", "verify"])
@pytest.mark.parametrize(
    ("make", "exit_code"),
    [(missing, 2), (empty, 2), (foreign, 2), (a_file, 2), (half_written, 3), (no_object, 3)],
)
def test_what_is_no_run_is_one_line_on_stderr(
    call: Call, tmp_path: Path, verb: str, make: Callable[[Path], Path], exit_code: int
) -> None:
    extra = ("--site", "*") if verb == "trace" else ()
    code, out, err = call(verb, make(tmp_path), *extra)
    assert (code, out) == (exit_code, "")
    assert err.startswith("ddpprobe: ")
    assert err.count("\n") == 1


def damage(path: Path) -> Path:
    """Flip one byte in the middle of a rank's journal."""
    segment = next(path.glob("journal/000/node_0000/rank_00001/*.wal"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    return path


@pytest.mark.parametrize("verb", ["info", "anomalies", "trace", "verify"])
def test_damage_is_listed_and_what_can_be_read_is_shown(
    call: Call, healthy: Path, verb: str
) -> None:
    extra = ("--site", "*") if verb == "trace" else ()
    code, out, err = call(verb, damage(healthy), *extra)
    assert code == 3
    assert out
    assert "ddpprobe: lost: journal/000/node_0000/rank_00001/" in err


def fold(path: Path) -> Path:
    """Let the daemon do what it does with a run that is over: fold it into the store."""
    source = "import sys; from ddpprobe.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["daemon", "--dir", str(path), "--linger", "0", "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, "-c", source, *words], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def test_the_store_says_what_the_journals_said_and_damage_to_it_is_named(
    call: Call, sick: Path
) -> None:
    trace = ("trace", sick, "--site", "blocks.0.mlp:*", "--stat", "norm", "--rank", 1)
    before = [call("anomalies", sick, "--json"), call(*trace)]
    fold(sick)
    assert [call("anomalies", sick, "--json"), call(*trace)] == before
    assert call("verify", sick)[0] == 0
    chunk = next(p for p in sick.glob("run.zarr/*/rank_00001/counts/c/**/*") if p.is_file())
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 0xFF
    chunk.write_bytes(data)
    for words in (("verify", sick), trace):
        code, _, err = call(*words)
        assert code == 3
        assert "ddpprobe: lost: run.zarr/attempt_000/rank_00001/counts" in err


def test_a_torn_tail_is_no_damage(call: Call, healthy: Path) -> None:
    segment = next(healthy.glob("journal/000/node_0000/rank_00001/*.wal"))
    segment.write_bytes(segment.read_bytes()[:-7])
    for verb in ("info", "anomalies", "verify"):
        code, _, err = call(verb, healthy)
        assert (code, "lost" in err) == (4, False)
        assert "rank 1: how it ended is not known" in err  # the frame was its last word


def test_verify_says_that_all_is_well(call: Call, healthy: Path) -> None:
    code, out, err = call("verify", healthy)
    assert (code, err) == (0, "")
    assert out
    assert isinstance(json.loads(call("verify", healthy, "--json")[1]), dict)


@pytest.mark.parametrize(
    "words", [(), ("fix",), ("compare",), ("trace", "run", "more"), ("info", "a", "--no")]
)
def test_wrong_use_exits_with_2_and_shows_the_usage(call: Call, words: tuple[str, ...]) -> None:
    code, _, err = call(*words)
    assert code == 2
    assert "usage: ddpprobe" in err


@pytest.mark.parametrize("words", [("--help",), ("info", "--help"), ("--version",)])
def test_help_and_version_exit_with_0(call: Call, words: tuple[str, ...]) -> None:
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    assert "ddpprobe" in out


def test_the_daemons_options_are_its_own(call: Call, tmp_path: Path) -> None:
    assert call("daemon", "--dir", tmp_path / "nothing")[0] == 2
    assert call("daemon", "--no-such-option")[0] == 2
    assert "--dir" in call("daemon", "--help")[1]


def loaded_by(*words: object) -> set[str]:
    """Return the modules that a command line loads."""
    source = (
        "import sys; from ddpprobe.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, words)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_help_and_version_load_no_verb_and_nothing_that_one_needs() -> None:
    for words in (["--help"], ["--version"]):
        loaded = loaded_by(*words)
        assert not any(name.startswith("ddpprobe.cli.commands") for name in loaded)
        assert not {"numpy", "zarr", "torch", "rich", "plotext", "prometheus_client"} & loaded
        assert "ddpprobe.cli.main" in loaded


def test_a_verb_loads_its_own_module_and_no_other_verbs(healthy: Path) -> None:
    loaded = loaded_by("anomalies", healthy)
    ours = {name for name in loaded if name.startswith("ddpprobe.cli.commands.")}
    assert ours == {"ddpprobe.cli.commands.anomalies"}
    assert not any(name.startswith("ddpprobe.report") for name in loaded)
    assert not {"zarr", "torch", "rich", "plotext", "jinja2", "hypercorn"} & loaded


def test_the_table_of_verbs_says_what_their_modules_say() -> None:
    files = {f.stem for f in Path(commands.__file__).parent.glob("[!_]*.py")}
    assert set(VERBS) == files
    for name, verb in VERBS.items():
        module = importlib.import_module(f"ddpprobe.cli.commands.{name}")
        assert (module.__doc__ or "").partition("\n")[0] == f"{verb.help}."


def test_python_m_ddpprobe_is_the_command_line(healthy: Path) -> None:
    command = [sys.executable, "-m", "ddpprobe", "anomalies", str(healthy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = "no anomalies in 40 sampled steps\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_a_closed_pipe_is_quiet(healthy: Path) -> None:
    source = "import sys; from ddpprobe.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", source, "trace", str(healthy), "--site", "*"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize("words", [("info",), ("trace", "--site", "*")])
def test_a_full_disk_under_standard_output_is_told_as_that(healthy: Path, words) -> None:
    verb, *more = words
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ddpprobe", verb, str(healthy), *more]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    said = "ddpprobe: standard output takes no more: [Errno 28] No space left on device"
    assert done.stderr.splitlines()[-1] == said
    assert "Traceback" not in done.stderr


def test_output_survives_a_terminal_that_knows_only_ascii(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ascii:
        encoding = "ascii"
        text = ""

        def write(self, text: str) -> None:
            self.text += text

    terminal = Ascii()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.say("größe")
    assert terminal.text == "gr\\xf6\\xdfe\n"


def test_json_is_strict() -> None:
    value: dict[str, Any] = {"a": [float("nan"), float("inf"), 1.5], "b": {"c": -float("inf")}}
    assert output._strict(value) == {"a": [None, None, 1.5], "b": {"c": None}}


# ---- exit codes, which stand in one table


def test_the_help_of_every_verb_says_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (None, *(v for v in VERBS if v != "daemon")):
        assert main.main(["--help"] if verb is None else [verb, "--help"]) == 0
        said = capsys.readouterr().out
        codes = re.findall(r"^  (\d)  ", said.partition("exit codes")[2], re.MULTILINE)
        assert [int(code) for code in codes] == [code for code, _ in exits(verb)]
    assert main.main(["daemon", "--help"]) == 0
    assert "exit codes: 0 nothing wrong; 2 wrong use" in capsys.readouterr().out
    assert [v for v in VERBS if output.PAGED in VERBS[v].codes] == ["anomalies"]


def test_the_documents_say_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    for code, meaning in exits():
        assert f"| {code} | {meaning} |" in page
    found = dict[str, tuple[int, ...]]()
    for verbs, codes in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([\d, ]+) \|$", page, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"\w+", verbs), tuple(map(int, codes.split(", "))))
    assert found == {name: verb.codes for name, verb in VERBS.items()}


def test_info_and_the_report_say_the_last_step_and_not_the_last_sampled_one(
    call: Call, tmp_path: Path
) -> None:
    path = make_run(tmp_path / "run", ranks=1)  # steps 0 to 39
    beat = HeartbeatWriter(RunDir(path).heartbeat(0, "node_0000", 0))
    beat.beat(step=49, micro=0, state=STATES.index("closed"), steps=50, skipped=0, sampled=40,
              phase_seconds=(1.0, 1.0, 1.0, 1.0), probe_seconds=0.0)  # fmt: skip
    beat.close()
    assert call("report", path, "-o", tmp_path / "page.html")[0] == 0
    assert "The last step is 49." in (tmp_path / "page.html").read_text()
    told = call("info", path)[1]
    assert told.count("0 to 49, recorded up to 39") == 2  # of the run and of its attempt
    assert json.loads(call("info", path, "--json")[1])["reached"] == 49


def test_info_and_the_report_say_the_first_step_that_was_trained_and_which_are_recorded(
    call: Call, tmp_path: Path
) -> None:
    """A resumed attempt of steps 23 to 47, of which the run holds 30 to 39."""
    path = make_run(tmp_path / "run", ranks=1, first=30)
    beat = HeartbeatWriter(RunDir(path).heartbeat(0, "node_0000", 0))
    place = {"micro": 0, "skipped": 0, "sampled": 10, "probe_seconds": 0.0}
    for state, step, steps in (("forward", 47, 24), ("data", 47, 25)):
        beat.beat(step=step, state=STATES.index(state), steps=steps,
                  phase_seconds=(1.0, 1.0, 1.0, 1.0), **place)  # fmt: skip
        assert call("info", path)[1].count("23 to 47, recorded 30 to 39") == 2
        told = json.loads(call("info", path, "--json")[1])
        assert (told["began"], told["reached"]) == (23, 47)
    beat.close()
    assert call("report", path, "-o", tmp_path / "page.html")[0] == 0
    assert (tmp_path / "page.html").read_text().count("23 to 47, recorded 30 to 39") == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_with_a_closed_stream_the_exit_code_is_that_of_what_was_found(tmp_path, closed) -> None:
    for words, code in (
        (["--version"], 0),
        (["info", str(tmp_path / "none")], 2),
        (["ls", "."], 0),
    ):
        command = [sys.executable, "-m", "ddpprobe", *words]
        shell = f'exec "$0" "$@" {closed}'
        done = subprocess.run(
            ["sh", "-c", shell, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, (words, done.stderr)
        assert "Traceback" not in done.stderr
