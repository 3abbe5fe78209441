"""What is left of the memory that a control group may have, and how many were killed in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpprobe.daemon import host, memory_group
from ddpprobe.daemon.liveness import ProcessWatcher
from ddpprobe.daemon.memory_group import MemoryGroup
from ddpprobe.daemon.memory_kills import LATELY_SECONDS, MemoryKills

GIB = 1 << 30
NO_LIMIT = 9223372036854771712  # what version 1 says


class Tree:
    """A made /proc and /sys/fs/cgroup."""

    def __init__(self, path: Path) -> None:
        self.proc, self.root = path / "proc", path / "cgroup"

    def process(self, pid: int, lines: str) -> None:
        (self.proc / str(pid)).mkdir(parents=True)
        (self.proc / str(pid) / "cgroup").write_text(lines)

    def group(self, path: str, *, version: int, limit: object, used: int, files: int) -> Path:
        """Make a group; of `used` bytes `files` are inactive pages of files. It killed 3."""
        place = self.root / path
        place.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (place / "memory.events").write_text("low 0\nhigh 7\nmax 9\noom 4\noom_kill 3\n")
            (place / "memory.max").write_text(f"{limit}\n")
            (place / "memory.current").write_text(f"{used}\n")
            (place / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")
        else:
            (place / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 3\n")
            (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
            (place / "memory.usage_in_bytes").write_text(f"{used}\n")
            (place / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {files}\n")
        return place


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path)
    monkeypatch.setattr(memory_group, "PROC", made.proc)
    monkeypatch.setattr(memory_group, "ROOT", made.root)
    return made


V1, V2 = "11:cpu:/x\n4:memory,hugetlb:{0}\n0::/\n", "0::{0}\n"


@pytest.mark.parametrize(
    ("version", "lines", "prefix"), [(1, V1, "memory/"), (2, V2, "")], ids=["v1", "v2"]
)
class TestOfEitherVersion:
    def test_left_is_the_limit_without_what_cannot_be_had_back_at_once(
        self, tree: Tree, version: int, lines: str, prefix: str
    ) -> None:
        tree.process(7, lines.format("/job/step"))
        tree.group(f"{prefix}job/step", version=version, limit=8 * GIB, used=7 * GIB, files=2 * GIB)
        group = MemoryGroup.of(7)
        assert group is not None
        assert (group.kills(), group.left()) == (3, (3.0 * GIB, 8.0 * GIB))

    def test_of_the_groups_around_a_process_the_one_with_the_least_left_counts(
        self, tree: Tree, version: int, lines: str, prefix: str
    ) -> None:
        none = "max" if version == 2 else NO_LIMIT
        tree.process(7, lines.format("/job/step"))
        tree.group(f"{prefix}job/step", version=version, limit=9 * GIB, used=GIB, files=0)
        tree.group(f"{prefix}job", version=version, limit=4 * GIB, used=3 * GIB, files=0)
        tree.group(prefix or ".", version=version, limit=none, used=9 * GIB, files=0)
        group = MemoryGroup.of(7)
        assert group is not None
        assert group.left() == (GIB, 4.0 * GIB)

    def test_who_is_beyond_its_limit_has_nothing_left(
        self, tree: Tree, version: int, lines: str, prefix: str
    ) -> None:
        tree.process(7, lines.format("/job"))
        tree.group(f"{prefix}job", version=version, limit=100, used=120, files=0)
        group = MemoryGroup.of(7)
        assert group is not None
        assert group.left() == (0.0, 100.0)

    def test_a_group_without_a_limit_leaves_what_the_machine_has(
        self, tree: Tree, version: int, lines: str, prefix: str, tmp_path: Path
    ) -> None:
        none = "max" if version == 2 else NO_LIMIT
        tree.process(7, lines.format("/job"))
        tree.group(f"{prefix}job", version=version, limit=none, used=GIB, files=0)
        group = MemoryGroup.of(7)
        assert group is not None
        assert group.left() is None
        total = psutil.virtual_memory().total
        assert host.read_host(tmp_path, [7])["memory_total_bytes"] == total

    def test_the_node_s_reading_is_that_of_the_tightest_group_of_its_ranks(
        self, tree: Tree, version: int, lines: str, prefix: str, tmp_path: Path
    ) -> None:
        for pid, used in ((7, 40), (8, 90)):
            tree.process(pid, lines.format(f"/{pid}"))
            tree.group(f"{prefix}{pid}", version=version, limit=100, used=used, files=0)
        read = host.read_host(tmp_path, [7, 8, 9])  # 9 has died
        assert (read["memory_available_bytes"], read["memory_total_bytes"]) == (10.0, 100.0)

    def test_in_a_container_that_sees_its_host_s_paths_the_topmost_group_is_its_own(
        self, tree: Tree, version: int, lines: str, prefix: str
    ) -> None:
        tree.process(7, lines.format("/docker/0123abcd"))
        tree.group(prefix or ".", version=version, limit=GIB, used=0, files=0)
        group = MemoryGroup.of(7)
        assert group is not None
        assert (group.path, group.left()) == (group.top, (GIB, GIB))


def test_without_a_group_the_machine_s_count_is_what_there_is(tree: Tree) -> None:
    tree.process(7, "0::/\n")
    (tree.proc / "vmstat").write_text("pgfault 8\noom_kill 4\n")
    kills = MemoryKills()
    kills.watch("a", 7, 0.0)
    (tree.proc / "vmstat").write_text("pgfault 9\noom_kill 6\n")
    assert MemoryGroup.of(7) is None
    assert kills.take("a") == 2


class TestLately:
    def count(self, tree: Tree, kills: int) -> None:
        (tree.root / "job" / "memory.events").write_text(f"oom_kill {kills}\n")

    @pytest.fixture
    def kills(self, tree: Tree) -> MemoryKills:
        tree.process(7, V2.format("/job"))
        tree.group("job", version=2, limit="max", used=0, files=0)
        found = MemoryKills()
        found.watch("a", 7, 0.0)
        return found

    def test_what_was_counted_before_a_process_began_is_not_told(self, kills: MemoryKills) -> None:
        assert kills.take("a") == 0

    def test_a_kill_is_told_if_a_look_was_taken_between_it_and_the_end(
        self, tree: Tree, kills: MemoryKills
    ) -> None:
        """A large process is long on its way out."""
        self.count(tree, 4)
        kills.look(LATELY_SECONDS - 1)
        assert kills.take("a") == 1

    def test_a_kill_within_the_last_minute_is_told_whenever_looks_are_taken(
        self, tree: Tree, kills: MemoryKills
    ) -> None:
        self.count(tree, 4)
        kills.look(LATELY_SECONDS - 1)
        kills.look(LATELY_SECONDS + 1)
        assert kills.take("a") == 1

    def test_a_kill_of_long_ago_is_not_told(self, tree: Tree, kills: MemoryKills) -> None:
        self.count(tree, 4)
        for at in range(1, 5):
            kills.look(at * LATELY_SECONDS)
        assert kills.take("a") == 0

    def test_a_group_that_was_made_anew_has_killed_nobody(
        self, tree: Tree, kills: MemoryKills
    ) -> None:
        self.count(tree, 0)
        assert kills.take("a") == 0

    def test_of_a_group_that_went_with_its_last_process_the_last_look_counts(
        self, tree: Tree, kills: MemoryKills
    ) -> None:
        self.count(tree, 5)
        kills.look(1.0)
        (tree.root / "job" / "memory.events").unlink()
        kills.look(2.0)
        assert kills.take("a") == 2
        assert kills.take("a") == 0  # it is forgotten

    def test_of_a_process_that_cannot_be_looked_at_nothing_is_told(self, tree: Tree) -> None:
        kills = MemoryKills()
        kills.watch("b", 8, 0.0)
        kills.look(1.0)
        assert kills.take("b") == 0


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A real control group of 40 MiB."""
    top = Path("/sys/fs/cgroup")
    unified = (top / "cgroup.controllers").exists()
    group = (top if unified else top / "memory") / f"ddpprobe_test_{os.getpid()}"
    limit = group / ("memory.max" if unified else "memory.limit_in_bytes")
    try:
        group.mkdir()
        limit.write_text(str(40 << 20))
        (group / "cgroup.procs").read_text()
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"this machine lets nobody make a control group here: {error}")
    yield group
    group.rmdir()


def test_of_a_process_that_the_kernel_killed_it_is_known_that_memory_was_wanting(
    small_group: Path, poll
) -> None:
    code = "input(); [print(flush=True)]; input(); x = bytearray(200 << 20)"
    watcher = ProcessWatcher()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        (small_group / "cgroup.procs").write_text(str(process.pid))
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert watcher.watch((0, 0), process.pid, psutil.Process(process.pid).create_time())
        watcher.sample()
        process.stdin.write(b"\n")
        process.stdin.flush()
        exits: list = []
        poll(lambda: exits.extend(watcher.exits()) or exits)
    watcher.close()
    assert [(gone.how, gone.memory_kills) for gone in exits] == [("SIGKILL", 1)]
