"""Two nodes push to one head: over loopback, and between two network namespaces."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.cli import main
from ddpprobe.daemon.launch import DaemonKeeper
from ddpprobe.detectors.suite import default_suite
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir import roster
from ddpprobe.rundir.paths import make_dir

from .. import made_cluster
from ..daemon.made_certificates import Authority
from ..launcher import Launcher
from ..waiting import PATIENCE, daemons_below
from . import daemon_harness, rank_process, real_job
from .host import Host

wait, kill = daemon_harness.wait, daemon_harness.kill
Harness = daemon_harness.Harness


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Harness]]:
    """Two nodes that share nothing but the network: each has its own disk."""
    made = [Harness(tmp_path / f"node{n}") for n in range(2)]
    for node in made:
        node.patient = True
    yield made
    for node in made:
        node.close()


@pytest.fixture
def port() -> int:
    return real_job.free_port()


def start_ranks(
    nodes: list[Harness],
    killed: int | None = None,
    networks: Sequence[str] = (),
    **spec: object,
) -> list[subprocess.Popen[bytes]]:
    """Four ranks, two a node; rank 2, on the node that is not the head, goes bad at step 30.

    One may be killed (SIGKILL) after its last step. `networks`: that of each node.

    They begin together: a head waits five seconds for the slowest one, and no machine is that fast.
    """
    started, attempt = [], int(str(spec.get("attempt", 0)))
    gate = nodes[0].run.path / f"gate_{attempt}"
    for rank in range(4):
        bad = 30 if rank == 2 else None
        given = {"node": rank // 2, "local_world_size": 2, "bad": bad, "world": 4, **spec}
        if networks:
            given["network"] = networks[rank // 2]
        if rank == killed:
            given |= {"closed": False, "signal": signal.SIGKILL}
        started.append(nodes[rank // 2].rank(rank, gate=str(gate), **given))
    wait(lambda: all(nodes[r // 2].journal_of(r, r // 2, attempt) for r in range(4)), 60)
    gate.touch()
    return started


def agree(nodes: list[Harness], attempt: int, **others: Iterable[int]) -> dict[str, str]:
    """Do what `install()` does at the start of an attempt; return the secrets by node."""
    ranks = {"node_0001": frozenset({2, 3})} | {n: frozenset(r) for n, r in others.items()}
    secrets = {name: roster.new_secret() for name in ranks}
    listed = roster.Roster(attempt, ranks, {n: roster.digest(s) for n, s in secrets.items()})
    listed.write(nodes[0].run.daemon_file("node_0000", roster.ROSTER))
    path = nodes[1].run.daemon_file("node_0001", roster.SECRET)
    roster.keep_secret(path, secrets["node_0001"])
    return secrets


def assert_all_merged(head: Harness, steps: int) -> None:
    assert head.merged_steps() == list(range(steps))
    group = daemon_harness.StoredGroup(head.run, "attempt_000/merged")
    for record in group.records(0):
        assert (record.ranks, record.missing) == ((0, 1, 2, 3), ())
        assert record.counts[:, 0].tolist() == [406, 406]
        assert record.values[0].tolist() == [-4.0, record.step, 4 * record.step + 6, 16.0]
        assert set(record.scalars) == {0, 1, 2, 3}
    found = [(a.step, a.rank, a.module, a.first_cause) for a in head.anomalies()]
    assert found == [(30, 2, "blocks.1", True)]


def test_the_head_names_the_guilty_rank_of_another_node(nodes, port) -> None:
    head, other = nodes
    daemons = [
        head.daemon(0, "--gather-listen", f"127.0.0.1:{port}"),
        other.daemon(1, "--head", f"http://127.0.0.1:{port}"),
    ]
    ranks = start_ranks(nodes, steps=60)
    assert [r.wait(30 * PATIENCE) for r in ranks] == [0] * 4
    assert [d.wait(30 * PATIENCE) for d in daemons] == [0, 0]
    assert_all_merged(head, 60)
    told = [(c["step"], c["rank"], c["module"]) for c in head.life("first_cause")]
    assert told == [(30, 2, "blocks.1")]
    # The other node keeps its own ranks' rows, and merges nothing itself.
    for rank in (2, 3):
        rows = daemon_harness.StoredGroup(other.run, f"attempt_000/rank_{rank:05d}").rows
        assert rows == 60
    assert other.merged_steps() == []
    assert not list((head.run.path / "daemon" / "node_0000.inbox").iterdir())


def test_the_head_names_a_rank_of_another_node_that_went_apart(nodes, port) -> None:
    head, other = nodes
    daemons = [
        head.daemon(0, "--gather-listen", f"127.0.0.1:{port}"),
        other.daemon(1, "--head", f"http://127.0.0.1:{port}"),
    ]
    ranks = [
        nodes[rank // 2].rank(
            rank, world=4, steps=40, node=rank // 2, local_world_size=2,
            parted=25 if rank == 3 else None,
        )
        for rank in range(4)
    ]  # fmt: skip
    assert [r.wait(30 * PATIENCE) for r in ranks] == [0] * 4
    assert [d.wait(30 * PATIENCE) for d in daemons] == [0, 0]
    (live,) = head.anomalies()
    assert (live.detector, live.step, live.rank, live.module) == ("desync", 25, 3, "v")
    group = daemon_harness.StoredGroup(head.run, "attempt_000/merged")
    disputed = {("v", ""): {0: 0b0111, -3: 0b1000}}
    assert [r.digests for r in group.records(0)] == [{}] * 25 + [disputed] * 15
    suite = default_suite()
    assert [a for r in group.records(0) for a in suite.update(r)] == [live]


@pytest.mark.parametrize("draw", range(2))
def test_a_killed_head_is_followed_without_loss_or_duplicate(nodes, port, draw) -> None:
    head, other = nodes
    rng = random.Random(draw)
    daemon = other.daemon(1, "--head", f"http://127.0.0.1:{port}")
    # They stay until the last head is there: it would wait for a node that ended before it began.
    end = head.run.path / "end"
    ranks = start_ranks(nodes, steps=250, delay=0.012, go_on=str(end))
    while any(len(nodes[n // 2].acked(n)) < 250 for n in range(4)):
        leader = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}")
        try:
            leader.wait(rng.uniform(0.4, 2.0))
        except subprocess.TimeoutExpired:
            kill(leader)
    leader = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}")
    head.until_merged(lambda r: r.step == 249, 40)
    end.touch()
    assert [rank.wait(40 * PATIENCE) for rank in ranks] == [0, 0, 0, 0]
    assert [leader.wait(40 * PATIENCE), daemon.wait(40 * PATIENCE)] == [0, 0]
    assert_all_merged(head, 250)


@pytest.mark.parametrize("draw", range(2))
def test_a_killed_node_daemon_is_followed_without_loss_or_duplicate(nodes, port, draw) -> None:
    head, other = nodes
    rng = random.Random(draw)
    leader = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}")
    end = head.run.path / "end"
    ranks = start_ranks(nodes, steps=250, delay=0.012, go_on=str(end))
    while len(other.acked(3)) < 225:
        daemon = other.daemon(1, "--head", f"http://127.0.0.1:{port}")
        try:
            daemon.wait(rng.uniform(0.7, 1.5))
        except subprocess.TimeoutExpired:
            kill(daemon)
    daemon = other.daemon(1, "--head", f"http://127.0.0.1:{port}")
    merged = head.until_merged(lambda r: r.step == 249, 40)
    assert len(merged) == 1
    end.touch()
    assert [rank.wait(40 * PATIENCE) for rank in ranks] == [0, 0, 0, 0]
    assert [leader.wait(40 * PATIENCE), daemon.wait(40 * PATIENCE)] == [0, 0]
    assert head.merged_steps() == list(range(250))


def test_a_node_that_falls_silent_is_missing_and_holds_nobody_up(nodes, port) -> None:
    """It is killed, and so is the patient head that waited for it: the next one does not."""
    head, other = nodes
    leader = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}")
    daemon = other.daemon(1, "--head", f"http://127.0.0.1:{port}")
    end = head.run.path / "end"
    ranks = start_ranks(nodes, steps=1_000_000, delay=0.02, hang=True, end=str(end))
    head.until_merged(lambda r: r.ranks == (0, 1, 2, 3))
    kill(daemon)
    kill(leader)
    with daemon_harness.stopped(ranks):  # what they do from now on, nobody tells the head
        steps = 20 + max(len(nodes[n // 2].acked(n)) for n in range(4))
        end.write_text(str(steps))
    wait(lambda: all(len(nodes[n // 2].acked(n)) == steps for n in range(4)))
    head.patient = False
    leader = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}")
    head.until_merged(lambda r: r.step == steps - 1)
    for rank in ranks:
        kill(rank)
    assert leader.wait(40 * PATIENCE) == 0
    assert head.merged_steps() == list(range(steps))
    last = list(daemon_harness.StoredGroup(head.run, "attempt_000/merged").records(0))[-1]
    assert (last.ranks, last.missing) == ((0, 1), (2, 3))


def test_a_wrong_token_is_refused_and_hurts_nobody(nodes, port) -> None:
    head, other = nodes
    head.patient = False
    leader = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}")
    daemon = other.daemon(1, "--head", f"http://127.0.0.1:{port}", token="guessed")
    ranks = start_ranks(nodes, steps=20)
    assert [r.wait(30 * PATIENCE) for r in ranks] == [0] * 4
    assert [leader.wait(40 * PATIENCE), daemon.wait(40 * PATIENCE)] == [0, 0]
    assert "answers 401" in other.log(1)
    assert "guessed" not in other.log(1) + head.log(0)
    records = list(daemon_harness.StoredGroup(head.run, "attempt_000/merged").records(0))
    assert [r.step for r in records] == list(range(20))
    assert {(r.ranks, r.missing) for r in records} == {((0, 1), (2, 3))}


def test_a_restarted_job_with_a_new_head_gathers_and_names_who_dies_elsewhere(nodes, port) -> None:
    """The other node's daemon lingers through the restart and is told in the ranks' journals."""
    head, other = nodes

    def start(attempt: int, url: str, **spec: object) -> list[subprocess.Popen[bytes]]:
        return start_ranks(nodes, steps=40, attempt=attempt, head_url=url, **spec)

    agree(nodes, 0)
    daemon = other.daemon(1, "--head", "http://127.0.0.1:1", token=None, linger=60.0)
    leader = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}", token=None)
    assert all(wait(lambda n=n: nodes[n].said(n)) for n in (0, 1))
    assert [r.wait(30 * PATIENCE) for r in start(0, f"http://127.0.0.1:{port}")] == [0] * 4
    assert leader.wait(40 * PATIENCE) == 0
    agree(nodes, 1)
    gather = ["--gather-listen", "127.0.0.1:0"]
    leader = head.daemon(0, *gather, "--wait", "60", token=None)
    said = wait(head.said)
    ranks = start(1, f"http://{said['gather']}", bad=None, killed=3)
    assert [r.wait(30 * PATIENCE) for r in ranks] == [0, 0, 0, -signal.SIGKILL]
    assert leader.wait(40 * PATIENCE) == 0
    daemon.terminate()
    assert daemon.wait(20 * PATIENCE) == 0
    for attempt in (0, 1):
        group = daemon_harness.StoredGroup(head.run, f"attempt_{attempt:03d}/merged")
        merged = [(r.step, r.ranks) for r in group.records(attempt)]
        assert merged == [(step, (0, 1, 2, 3)) for step in range(40)]
    # The head has heard how all ended, and so has who reads its disk alone.
    assert [head.life("end", attempt=n)[-1]["state"] for n in (0, 1)] == ["ended", "crashed"]
    told = [(c["detector"], c["rank"], c["step"]) for c in head.life("first_cause", attempt=1)]
    assert told == [("rank_lost", 3, 40)]
    found = ddpprobe.open(head.run.path).anomalies()
    assert [(a.level, a.rank) for a in found if a.detector == "rank_lost"] == [("page", 3)]


def test_a_hostile_node_with_its_own_secret_changes_nothing_and_metrics_stay_alive(nodes) -> None:
    """Node 2, of rank 4, which never trains, pushes all sorts of things while the others do."""
    head, other = nodes
    secrets = agree(nodes, 0, node_0002={4})
    leader = head.daemon(0, "--gather-listen", "127.0.0.1:0", token=None)
    url = f"http://{wait(head.said)['gather']}"
    daemon = other.daemon(1, "--head", url, token=None)
    wait(lambda: other.said(1))
    ranks = start_ranks(nodes, world=5, steps=150, hang=True)

    def push(body: bytes, node: str = "node_0002", secret: str = "node_0002") -> int:
        headers = {"Authorization": f"Bearer {secrets[secret]}", "Ddpprobe-Node": node}
        post = urllib.request.Request(f"{url}/gather", body, headers)
        try:
            with urllib.request.urlopen(post) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code

    wait(lambda: push(made_cluster.block({"event": "ended", "attempt": 0, "ranks": [4]})) == 204)
    wait(head.metrics)
    assert push(b"x", node="node_0001") == 401
    assert push(b"x", node="node_0000") == 401
    rng, seen = random.Random(9), set()
    step = 0
    while step < 5 or any(len(nodes[r // 2].acked(r)) < 150 for r in range(4)):
        for made in (
            rank_process.record(0, step, bad=True),  # the head's rank, and a false page of it
            rank_process.record(3, step, bad=True),
            replace(rank_process.record(4, step), ranks=(4, 4)),
            replace(rank_process.record(4, step), step=2**62),
            replace(rank_process.record(4, step), ranks=tuple(range(200_000))),
            replace(rank_process.record(4, step), attempt=step + 1),
        ):
            seen.add(push(made_cluster.block(made)))
        seen.add(push(rng.randbytes(100)))
        seen.add(push(made_cluster.block(made_cluster.wish(4, cause="request/../../evil"))))
        assert "ddpprobe_build_info" in head.metrics()
        step += 1
    head.until_merged(lambda r: r.step == 149, 40)
    for rank in ranks:
        kill(rank)
    assert [d.wait(40 * PATIENCE) for d in (leader, daemon)] == [0, 0]
    assert seen == {400, 409}
    records = list(daemon_harness.StoredGroup(head.run, "attempt_000/merged").records(0))
    assert [r.step for r in records] == list(range(150))
    assert {(r.ranks, r.missing) for r in records} == {((0, 1, 2, 3), (4,))}
    assert all(r.counts[:, 0].tolist() == [406, 406] for r in records)
    pages = [(a.step, a.rank) for a in head.anomalies() if a.level == "page"]
    assert pages == [(30, 2)]
    assert not list(head.run.path.rglob("*.answer"))
    log = head.log()
    assert 3 <= log.count("node_0002: what it pushes is refused") <= 6
    assert "node_0001" not in log
    assert not set(secrets.values()) & set(re.findall(r"[0-9a-f]{64}", log + other.log(1)))


def test_the_token_stands_on_no_command_line(nodes, port) -> None:
    head, _ = nodes
    daemon = head.daemon(0, "--gather-listen", f"127.0.0.1:{port}")
    wait(head.said)
    assert daemon_harness.TOKEN not in Path(f"/proc/{daemon.pid}/cmdline").read_text()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces joined by a veth pair: 10.213.7.1 and 10.213.7.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"ddpprobe{os.getpid()}n{n}" for n in range(2)]
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "ddpp0", "netns", names[0], "type", "veth",
           "peer", "name", "ddpp1", "netns", names[1])  # fmt: skip
        for n, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.7.{n + 1}/24", "dev", f"ddpp{n}")
            ip("-n", name, "link", "set", f"ddpp{n}", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for name in made:
            ip("netns", "del", name)
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    yield names
    for name in made:
        ip("netns", "del", name)


def web_config(folder: Path, signed: Authority, name: str, address: str, trusts: Path) -> Path:
    """Write a node's web config, and sign its certificate."""
    signed.sign(name, address=address)
    tls = {
        "cert_file": f"{name}.crt", "key_file": f"{name}.key", "client_ca_file": str(trusts),
        "client_auth_type": "RequireAndVerifyClientCert",
    }  # fmt: skip
    path = folder / f"{name}.yml"
    path.write_text(json.dumps({"tls_server_config": tls}))
    return path


@pytest.fixture
def web_configs(tmp_path: Path) -> list[Path]:
    """Web configs of the two hosts, whose certificates one authority has signed."""
    folder = make_dir(tmp_path / "tls")
    ours = Authority(folder)
    return [web_config(folder, ours, f"node{n}", f"10.213.7.{n + 1}", ours.file) for n in range(2)]


def test_two_hosts_gather_over_mutual_tls_and_a_wrong_certificate_is_told_to_the_training(
    nodes, namespaces, web_configs, tmp_path: Path, caplog
) -> None:
    """A daemon that shows another authority's certificate first; the right one follows it."""
    head, other = nodes
    folder = web_configs[0].parent
    stranger = Authority(folder, "stranger")
    wrong = web_config(folder, stranger, "wrong", "10.213.7.2", folder / "authority.crt")
    gather = ["--gather-listen", "10.213.7.1:13378", "--web-config", str(web_configs[0])]
    leader = head.daemon(0, *gather, network=namespaces[0])
    url = ["--head", "https://10.213.7.1:13378"]
    # It serves its metrics to all, and asks those for a certificate: that is nothing to warn of.
    to_all = ["--listen", "0.0.0.0:13377"]
    refused = other.daemon(1, *url, *to_all, "--web-config", str(wrong), network=namespaces[1])
    end = head.run.path / "end"
    ranks = start_ranks(nodes, steps=60, go_on=str(end))
    told = wait(lambda: (other.said(1) or {}).get("notices"))
    assert list(told) == ["push"]
    keeper = DaemonKeeper(other.run, "node_0001", lambda: None)
    keeper._next = 0.0
    for _ in range(2):
        keeper.look()
        keeper._next = 0.0
    (line,) = [r.getMessage() for r in caplog.records if "lacks this node" in r.getMessage()]
    assert line.startswith("ddpprobe: the head at 10.213.7.1:13378 does not answer (")
    kill(refused)
    daemon = other.daemon(1, *url, "--web-config", str(web_configs[1]), network=namespaces[1])
    head.until_merged(lambda r: r.step == 59, 40)
    wait(lambda: (other.said(1) or {}).get("notices") == {})
    end.touch()
    assert [r.wait(40 * PATIENCE) for r in ranks] == [0] * 4
    assert [leader.wait(40 * PATIENCE), daemon.wait(40 * PATIENCE)] == [0, 0]
    assert_all_merged(head, 60)


def test_two_hosts_on_a_network_gather_and_a_cut_cable_is_survived(nodes, namespaces) -> None:
    head, other = nodes
    leader = head.daemon(0, "--gather-listen", "10.213.7.1:13378", network=namespaces[0])
    daemon = other.daemon(1, "--head", "http://10.213.7.1:13378", network=namespaces[1])
    ranks = start_ranks(nodes, networks=namespaces, steps=200, delay=0.02)
    head.until_merged(lambda r: r.step >= 20)
    # Two seconds without a cable: less than the head's patience, so nothing is missing after it.
    ip("-n", namespaces[1], "link", "set", "ddpp1", "down")
    at = len(head.acked(0))
    wait(lambda: len(head.acked(0)) > min(at + 60, 190))
    ip("-n", namespaces[1], "link", "set", "ddpp1", "up")
    assert [r.wait(40 * PATIENCE) for r in ranks] == [0] * 4
    assert [leader.wait(40 * PATIENCE), daemon.wait(40 * PATIENCE)] == [0, 0]
    assert_all_merged(head, 200)


def launch_on(
    index: int, host: Host, words: Sequence[object], *, log: Path, cwd: Path, **env: str
) -> Launcher:
    """Start the job's part on one of two hosts; rank 3 plants a NaN at step 8."""
    options = ["--nnodes", "2", "--node-rank", index, "--nproc-per-node", "2",
               "--master-addr", "10.213.7.1", "--master-port", "29500"]  # fmt: skip
    script = [
        Path(__file__).with_name("job.py"), "--wrap", "ddp", "--every", "2", "--daemon", "auto",
        "--inject", "nan:step=8,rank=3,module=blocks.1.down", *words,
    ]  # fmt: skip
    env |= {"GLOO_SOCKET_IFNAME": f"ddpp{index}", "DDPPROBE_LINGER": "1"}
    where = {"cwd": cwd, "env": {**os.environ, **env}, "out": log, "err": log}
    return Launcher(options, script, **where, fresh=False, enter=host.enter)


def test_a_torch_job_over_two_hosts_and_mutual_tls_has_one_verdict_and_complete_statistics(
    namespaces, web_configs, tmp_path: Path, poll
) -> None:
    words = ["--steps", "16", "--out", tmp_path / "run"]
    launched = [
        launch_on(
            index, Host(host), words, log=tmp_path / f"{index}.log", cwd=tmp_path,
            DDPPROBE_WEB_CONFIG=str(web_configs[index]),
        )
        for index, host in enumerate(namespaces)
    ]  # fmt: skip
    codes = [process.wait(120) for process in launched]
    told = "\n".join(p.read_text() for p in tmp_path.glob("*.log"))
    assert codes == [0, 0], told
    assert "rank 0's disk" not in told  # one directory for both
    poll(lambda: not daemons_below(tmp_path), 40)  # both have sealed and gone
    run = ddpprobe.open(tmp_path / "run")
    (page,) = [a for a in run.anomalies() if a.level == "page"]
    assert (page.step, page.rank, page.module, page.phase) == (8, 3, "blocks.1.down", "forward")
    merged = [r for r in run.records() if r.sampled]  # one more may tell the losses of the end
    steps = [r.step for r in merged]
    real_job.assert_sampled(tmp_path / "run", steps, range(0, 16, 2))
    assert all(r.ranks == (0, 1, 2, 3) and r.missing == () for r in merged)
    for rank in range(4):
        assert [r.step for r in run.records(rank=rank) if r.sampled] == steps


def test_a_torch_job_on_two_disks_says_so_and_is_collected_into_one(
    namespaces, tmp_path: Path, poll
) -> None:
    """Each host has its own directory under the one path that rank 0's relative one stands for."""
    disks = [make_dir(tmp_path / f"disk{n}") for n in range(2)]
    home = make_dir(tmp_path / "home")
    words = ["--steps", "12", "--out", "run", "--capture", "blocks.1"]
    launched = [
        launch_on(
            index, Host(host, disk=(disks[index], home)), words, log=tmp_path / f"{index}.log",
            cwd=tmp_path if index else home,
        )
        for index, host in enumerate(namespaces)
    ]  # fmt: skip
    codes = [process.wait(240) for process in launched]
    logs = [p.read_text() for p in sorted(tmp_path.glob("*.log"))]
    assert codes == [0, 0], "\n".join(logs)
    said = [line for text in logs for line in text.splitlines() if "ddpprobe: " in line]
    (line,) = [line.partition("ddpprobe: ")[2] for line in said if "rank 0's disk" in line]
    assert line == (
        f"not on rank 0's disk: node 1. Every node writes its own ranks to {home / 'run'}; "
        "a relative run_dir is taken from rank 0's working directory; "
        "when the job has ended, merge them: ddpprobe collect DEST DIR..."
    )
    sources = [disk / "run" for disk in disks]
    poll(lambda: not daemons_below(tmp_path), 40)  # both have sealed and gone
    assert [(path / "overview.parquet").exists() for path in sources] == [True, False]  # the head
    parts = [ddpprobe.open(path) for path in sources]
    assert [part.ranks() for part in parts] == [[0, 1], [2, 3]]
    assert main.main(["collect", str(tmp_path / "all"), *map(str, sources)]) == 0
    run = ddpprobe.open(tmp_path / "all")
    assert verify(run).ok
    (page,) = [a for a in run.anomalies() if a.level == "page"]
    assert (page.step, page.rank, page.module, page.phase) == (8, 3, "blocks.1.down", "forward")
    for rank in range(4):
        own = parts[rank // 2]
        assert list(map(str, run.records(rank=rank))) == list(map(str, own.records(rank=rank)))
    sampled = [r for r in run.records() if r.sampled]
    real_job.assert_sampled(sources[0], [r.step for r in sampled], range(0, 12, 2))
    assert {r.ranks for r in sampled} == {(0, 1, 2, 3)}
    captured = [c for c in run.captures() if c.reason == "capture"]
    assert [(c.step, c.ranks, c.complete) for c in captured][:3] == [
        (step, (0, 1, 2, 3), True) for step in (0, 2, 4)
    ]
    for rank in range(4):
        of_all = run.tensor("blocks.1:output", 2)
        of_node = parts[rank // 2].tensor("blocks.1:output", 2)
        assert of_all.rank(rank).tobytes() == of_node.rank(rank).tobytes()
    assert of_all.shape[0] == sum(of_all.rank(r).shape[0] for r in range(4))
