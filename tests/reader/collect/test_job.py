"""Nodes with disks of their own, collected: what one shared disk would hold, whatever happens."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpprobe.cli.main import main
from ddpprobe.daemon import __main__ as daemon
from ddpprobe.reader.collect.captures import READY, STAGE
from ddpprobe.reader.collect.job import collect
from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import paths
from ddpprobe.rundir.paths import DirectoryLock, RunDir, node_name
from ddpprobe.store.writer import StoreWriter

from ... import made_nodes
from ...clouds import Cloud, serving, upload, url_of
from ...made_nodes import CAPTURED, SITES
from ...made_runs import key, tree

WORLD = 4
BESIDE = {"collect.lock", "collected.json"}  # what only a collected directory has


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """One run twice: on one disk, and each of two nodes on its own."""
    top = tmp_path_factory.mktemp("made")
    made_nodes.make([top / "shared", top / "shared"])
    made_nodes.make([top / "0", top / "1"])
    return {name: top / name for name in ("shared", "0", "1")}


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory) -> Path:
    """The two nodes, collected."""
    dest = tmp_path_factory.mktemp("whole") / "run"
    done = collect(dest, [made["0"], made["1"]])
    assert (done.damage, done.mended, done.ranks, done.unsealed) == ([], [], [0, 1, 2, 3], [])
    return dest


@pytest.fixture
def nodes(made, tmp_path) -> list[Path]:
    """Copies of the two nodes' directories, for a test to spoil."""
    return [Path(shutil.copytree(made[n], tmp_path / n)) for n in ("0", "1")]


def what_it_says(path: Path) -> tuple[object, ...]:
    """Return all that a reader can ask."""
    run = open_run(path)
    records = [key(r) for rank in (None, *run.ranks()) for r in run.records(rank)]
    tensors = [run.tensor(s, c.step)[...].tobytes() for c in run.captures() for s in SITES]
    readings = [(r.node, r.time_ns) for r in run.readings()]
    about = run.info()
    about = {k: v for k, v in about.items() if k not in {"path", "bytes", "unsealed"}}
    return records, run.anomalies(), tensors, readings, about, verify(run).damage


def marks(path: Path) -> dict[str, tuple[int, int]]:
    """Return what changes when a file is written, also with the same bytes."""
    files = [p for p in path.rglob("*") if p.is_file()]
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def first(path: Path, pattern: str) -> Path:
    return min(p for p in path.glob(pattern) if p.is_file())


# ---- it is what one disk would hold


def test_two_nodes_collected_are_byte_for_byte_the_store_of_one_disk(made, whole) -> None:
    one, two = tree(made["shared"] / "run.zarr"), tree(whole / "run.zarr")
    assert two == one
    beside = {n.partition("/")[0] for n in tree(whole).keys() - tree(made["shared"]).keys()}
    assert beside == BESIDE
    assert what_it_says(whole) == what_it_says(made["shared"])
    there = open_run(whole)
    for step in CAPTURED:
        for site in SITES:
            expected = made_nodes.whole(site, WORLD, step)
            assert there.tensor(site, step)[...].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "words",
    [
        "info RUN", "info RUN --json", "anomalies RUN", "anomalies RUN --json", "verify RUN",
        "trace RUN --site *", "trace RUN --site * --rank 3 --json", "replay RUN",
        "export RUN --format csv --rank all -o OUT", "report RUN -o OUT --json", "top RUN --json",
    ],
)  # fmt: skip
def test_every_verb_answers_as_on_one_disk(made, whole, tmp_path, capsys, words) -> None:
    said = []
    for name, path in (("shared", made["shared"]), ("whole", whole)):
        out = tmp_path / name
        given = [w.replace("RUN", str(path)).replace("OUT", str(out)) for w in words.split()]
        code = main(given)
        told = capsys.readouterr()
        text = (told.out + told.err).replace(str(path), "RUN").replace(str(out), "OUT")
        written = out.read_text().replace(str(path), "RUN") if out.exists() else ""
        said.append((code, _no_sizes(text), "" if "report" in words else written))
    assert said[0] == said[1]
    assert said[0][0] in {0, 1}


def _no_sizes(text: str) -> str:
    """Leave out bytes on the disk and ages: manifests tell what happened in more or fewer lines."""
    own = ("bytes", "manifest", "store", "journal", "total", "size", "seen", "KiB", "memory free")
    return "\n".join(line for line in text.splitlines() if not any(word in line for word in own))


def test_in_any_order_at_once_or_node_by_node_it_is_the_same(made, whole, tmp_path) -> None:
    collect(tmp_path / "backwards", [made["1"], made["0"]])
    for node in ("1", "0"):
        collect(tmp_path / "bit", [made[node]])
    for path in (tmp_path / "backwards", tmp_path / "bit"):
        assert tree(path) == tree(whole)


def test_a_second_time_nothing_is_written_and_the_sources_never_are(nodes, tmp_path) -> None:
    dest = tmp_path / "run"
    before = [marks(path) for path in nodes]
    collect(dest, nodes)
    done = marks(dest)
    again = collect(dest, nodes)
    assert (again.files, marks(dest)) == (0, done)
    assert [marks(path) for path in nodes] == before


def test_a_part_says_which_ranks_are_missing(made, tmp_path, capsys) -> None:
    assert main(["collect", str(tmp_path / "run"), str(made["0"])]) == 0
    assert "not there yet: ranks 2-3; collect the directories of their nodes" in (
        capsys.readouterr().out
    )
    assert main(["collect", str(tmp_path / "run"), str(made["1"]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["world_size"], told["ok"]) == ([0, 1, 2, 3], 4, True)


def test_a_node_whose_daemon_was_killed_is_read_from_its_journals(made, tmp_path) -> None:
    own = [r.path for r in made_nodes.make([tmp_path / "0", tmp_path / "1"], seal=False)]
    dest = tmp_path / "run"
    assert collect(dest, own).unsealed == ["node_0000", "node_0001"]
    assert what_it_says(dest) == what_it_says(made["shared"])
    # One node's directory is finished after all, then the other's: its journals are in the store.
    for node, left in ((0, ["node_0001"]), (1, [])):
        StoreWriter(RunDir(own[node]), node_name(node), block=8, durable=False).seal()
        assert collect(dest, own).unsealed == left
    assert what_it_says(dest) == what_it_says(made["shared"])
    collect(tmp_path / "new", own)
    assert tree(dest) == tree(tmp_path / "new")


@pytest.mark.parametrize("order", ["01", "10"])
def test_a_killed_run_that_is_finished_where_it_was_collected_keeps_all_ranks(
    made, tmp_path, order
) -> None:
    """No node pushes any more, but what its ranks wrote is there: they are not missing."""
    where = [tmp_path / "0", tmp_path / "1"]
    own = made_nodes.make(where, seal=False, captured=(), told=5)
    dest = tmp_path / "run"
    collect(dest, [r.path for r in own])
    expected = [key(r) for r in open_run(made["shared"]).records()]
    assert [key(r) for r in open_run(dest).records()] == expected
    for node in order:
        words = ["--dir", dest, "--node", node_name(int(node)), "--linger", "0", "--wait", "0.2"]
        assert daemon.main([*map(str, words), "--listen", "127.0.0.1:0"]) == 0
    run = open_run(dest)
    assert [key(r) for r in run.records()] == expected
    assert (run.info()["unsealed"], verify(run).damage) == ([], [])


# ---- killed


def test_killed_anywhere_and_run_again_it_is_the_same(made, whole, tmp_path) -> None:
    sources = [made["0"], made["1"]]
    total = _renames_of(tmp_path / "counted", sources)
    rng = random.Random(7)
    stages = [n for n in range(total) if _is_of_captures(n, total)]
    draws = {0, total - 1, *rng.sample(range(total), 1), *rng.sample(stages, 2)}
    for at in sorted(draws):
        dest = tmp_path / f"killed_{at}"
        assert _collect_killed(dest, sources, at) == signal.SIGKILL
        if at % 2:  # another node first: what is there of the others is only there
            collect(dest, [made["0"]])
        collect(dest, sources)
        assert tree(dest) == tree(whole), at
        assert not {STAGE, READY} & {p.name for p in dest.iterdir()}


def _is_of_captures(at: int, total: int) -> bool:
    """The last third of all renames: captured steps are written after the records."""
    return at > 2 * total // 3


def _renames_of(dest: Path, sources: list[Path]) -> int:
    counted = dest.with_suffix(".count")

    def note(n: int) -> None:
        counted.write_text(str(n))

    assert _in_child(lambda: collect(dest, sources), note) == 0
    return int(counted.read_text())


def _collect_killed(dest: Path, sources: list[Path], at: int) -> int:
    def kill(n: int) -> None:
        if n == at + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return _in_child(lambda: collect(dest, sources), kill)


def _in_child(work: Callable[[], object], renamed: Callable[[int], None]) -> int:
    """Do some work in a forked process, which is told before its n-th rename; how it ended."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, _: object) -> None:
            nonlocal count
            if event == "os.rename":
                count += 1
                renamed(count)

        sys.addaudithook(hook)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(9)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


# ---- damaged


DAMAGED = {
    "records": "run.zarr/attempt_000/rank_00002/counts/c/**/*",
    "metadata": "run.zarr/attempt_000/rank_00002/zarr.json",
    "manifest": "manifest/attempt_000.rank_00002.log",
    "tensor": "run.zarr/attempt_000/captures/step_0000000003/t00000/value/c/**/*",
    "captures": "manifest/attempt_000.captures.step_0000000003.log",
    "run.json": "run.json",
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_damaged_in_one_source_is_said_and_taken_from_another(
    nodes, whole, tmp_path, capsys, what
) -> None:
    copy = Path(shutil.copytree(nodes[1], tmp_path / "copy"))
    spoil(first(nodes[1], DAMAGED[what]))
    dest = tmp_path / "run"
    assert main(["collect", str(dest), *map(str, (nodes[1], nodes[0], copy))]) == 0
    assert f"damaged, taken from another source: {nodes[1]}" in capsys.readouterr().err
    assert tree(dest) == tree(whole)


@pytest.mark.parametrize("what", ["records", "metadata", "manifest", "tensor", "captures"])
def test_what_is_damaged_in_all_sources_is_said_and_missed(nodes, tmp_path, capsys, what) -> None:
    spoil(first(nodes[1], DAMAGED[what]))
    dest = tmp_path / "run"
    assert main(["collect", str(dest), *map(str, nodes)]) == 3
    assert f"ddpprobe: lost: {nodes[1]}" in capsys.readouterr().err
    assert verify(open_run(dest)).damage
    assert main(["collect", str(dest), *map(str, nodes), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["files"]) == (False, 0)
    # All else is there.
    assert [key(r) for r in open_run(dest).records(0)] == [
        key(r) for r in open_run(nodes[0]).records(0)
    ]


def test_a_run_json_that_no_source_has_is_said_and_all_else_is_there(
    nodes, tmp_path, capsys
) -> None:
    dest = tmp_path / "run"
    for node in nodes:
        (node / "run.json").unlink()
    assert main(["collect", str(dest), *map(str, nodes)]) == 3
    assert "ddpprobe: lost: run.json: no source has one" in capsys.readouterr().err
    assert [key(r) for r in open_run(dest).records(0)] == [
        key(r) for r in open_run(nodes[0]).records(0)
    ]


def test_a_damaged_journal_or_pack_is_taken_from_another_source(tmp_path, capsys) -> None:
    own = made_nodes.make([tmp_path / "0", tmp_path / "1"], seal=False)
    copy = shutil.copytree(own[1].path, tmp_path / "copy")
    for pattern in ("journal/000/*/rank_00002/*.wal", "captures/**/rank_00003/*.pack"):
        spoil(first(own[1].path, pattern))
    sources = [*(str(r.path) for r in own), str(copy)]
    assert main(["collect", str(tmp_path / "run"), *sources]) == 0
    assert capsys.readouterr().err.count("taken from another source") == 2
    assert main(["collect", str(tmp_path / "less"), *sources[:2]]) == 3
    assert capsys.readouterr().err.count("ddpprobe: lost: ") == 2
    assert len(verify(open_run(tmp_path / "run")).damage) == 0
    assert len(verify(open_run(tmp_path / "less")).damage) >= 2


def test_a_result_that_was_damaged_is_mended_by_the_next_call(made, whole, tmp_path) -> None:
    dest = Path(shutil.copytree(whole, tmp_path / "run"))
    for what in ("records", "tensor", "manifest"):
        spoil(first(dest, DAMAGED[what]))
    collect(dest, [made["0"], made["1"]])
    assert tree(dest) == tree(whole)


# ---- refused


def refusal(capsys, *words: object) -> str:
    assert main(["collect", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_what_cannot_be_collected_is_refused_in_one_line(nodes, tmp_path, capsys) -> None:
    dest, (one, two) = tmp_path / "run", nodes
    identity = json.loads((two / "run.json").read_text())
    paths.write_json(two / "run.json", {**identity, "run_id": "other"})
    assert "is of run 'other'" in refusal(capsys, dest, one, two)
    assert not dest.exists()
    assert "lie in one another" in refusal(capsys, one, one)
    assert "lie in one another" in refusal(capsys, one / "run", one)
    assert "not empty, and not made by collect" in refusal(capsys, tmp_path / "1", one)
    assert "no such directory" in refusal(capsys, dest, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "copy run.json from the directory" in refusal(capsys, dest, tmp_path / "empty")
    newer = Path(shutil.copytree(one, tmp_path / "newer"))
    paths.write_json(newer / "run.json", {**identity, "format_version": 99})
    assert "written by a newer ddpprobe" in refusal(capsys, dest, newer)
    assert "not to a URL" in refusal(capsys, "s3://runs/x", one)
    lock = DirectoryLock(RunDir(one).lock)
    assert lock.acquire()
    assert "still written to" in refusal(capsys, dest, one)
    lock.release()
    collect(dest, [one])
    assert "holds run 'id'" in refusal(capsys, dest, two)


# ---- from an object store


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Cloud]:
    with serving(tmp_path_factory.mktemp("cloud")) as cloud:
        yield cloud


def test_a_node_that_did_not_come_to_upload_is_collected_with_the_url(
    server, tmp_path, request, monkeypatch
) -> None:
    url = url_of(request)
    with server.given(tmp_path, monkeypatch):
        own = made_nodes.make([tmp_path / "0", tmp_path / "1"], seal=False)
        shared = made_nodes.make([tmp_path / "shared", tmp_path / "shared"])[0]
        for node, run in enumerate(own):
            identity = json.loads(run.run_json.read_text())
            there = {paths.OWN_DISK: "node_0001"} if node else {}
            paths.write_json(run.run_json, {**identity, "destination": url, **there})
            StoreWriter(run, node_name(node), block=8, durable=False, captures=not node).seal()
        upload(own[0], url).bring()
        dest = tmp_path / "run"
        assert main(["collect", str(dest), url, str(own[1].path)]) == 0
    told, expected = what_it_says(dest), what_it_says(shared.path)
    assert told[:4] == expected[:4]
    assert told[5] == []
    assert paths.OWN_DISK not in json.loads((dest / "run.json").read_text())
