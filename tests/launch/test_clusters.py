"""Scripts and manifests for clusters: what of them can be checked without a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ddpprobe.cli.main import main

from ..prometheus_harness import until
from ..waiting import PATIENCE

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
BIN = Path(sys.executable).parent
SLURM = sorted((LAUNCH / "slurm").iterdir())
COMPOSE = LAUNCH / "compose" / "compose.yml"

TRAIN = """
import torch
import torch.distributed as dist
import ddpprobe

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ddpprobe.install(model, every=1):
    for step in range(4):
        optimizer.zero_grad()
        batch = torch.ones(2, 4)
        if (rank, step) == (1, 2):
            batch[0, 0] = float("nan")
        model(batch).sum().backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""
# torchrun itself, whose ranks need not import torch once more.
FORKING = f'#!/bin/sh\nexec {sys.executable} -m tests.launcher "$@"\n'
# The words of Slurm that the script uses: a task for each node, all at once, on this machine.
SRUN = """#!/usr/bin/env bash
shift # --kill-on-bad-exit=0
pids=() worst=0
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit "$worst"
"""


def tree(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def pod() -> dict[str, Any]:
    (replicated,) = tree(LAUNCH / "kubernetes/jobset.yml")["spec"]["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]["template"]
    return found


def shellcheck(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "shellcheck"), "--enable=quote-safe-variables", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_shellcheck_finds_no_fault_in_the_scripts_for_slurm() -> None:
    done = shellcheck(*SLURM)
    assert done.returncode == 0, done.stdout


def test_shellcheck_finds_no_fault_in_what_a_task_and_a_pod_run(tmp_path: Path) -> None:
    (task,) = re.findall(r"bash -c '(.*?)'", (LAUNCH / "slurm/train.sbatch").read_text(), re.DOTALL)
    (container,) = pod()["spec"]["containers"]
    (args,) = container["args"]
    for name, text in (("task.sh", task), ("pod.sh", args)):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        done = shellcheck(tmp_path / name)
        assert done.returncode == 0, done.stdout


# torchrun and ddpprobe, as far as signals go: they say what they are told.
TORCHRUN = """#!/usr/bin/env bash
end() {
  echo torchrun got SIGTERM >> said
  kill "$!"
  sleep 0.3
  echo torchrun ended >> said
  exit 7
}
trap end TERM
echo torchrun runs >> said
sleep 600 & wait "$!"
"""
DDPPROBE = '#!/usr/bin/env bash\necho "ddpprobe $*" >> said\n'


def in_pid_namespace() -> list[str]:
    """Return the words that make a command process 1 of its own, if the system allows that."""
    words = ["unshare", "--pid", "--fork", "--kill-child"]
    allowed = shutil.which("unshare") and subprocess.run([*words, "true"], check=False)
    return words if allowed and allowed.returncode == 0 else []


def test_sigterm_reaches_torchrun_and_the_daemon_is_waited_for_behind_it(tmp_path: Path) -> None:
    """A kubelet sends it to process 1 alone, Slurm to all processes of a task."""
    (task,) = re.findall(r"bash -c '(.*?)'", (LAUNCH / "slurm/train.sbatch").read_text(), re.DOTALL)
    (container,) = pod()["spec"]["containers"]
    (args,) = container["args"]
    for name, script, prefix in (("pod", args, in_pid_namespace()), ("task", task, [])):
        folder = tmp_path / name
        (folder / "run").mkdir(parents=True)
        for word, text in (("torchrun", TORCHRUN), ("ddpprobe", DDPPROBE)):
            (folder / word).write_text(text)
            (folder / word).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}", "DDPPROBE_DIR": "run",
            "JOB_COMPLETION_INDEX": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1",
        }  # fmt: skip
        said = folder / "said"
        shell = subprocess.Popen(
            [*prefix, "bash", "-c", script], cwd=folder, env=environment, start_new_session=True
        )
        try:
            assert until(said.exists)
            if name == "task":
                os.killpg(shell.pid, signal.SIGTERM)
            else:
                first = psutil.Process(shell.pid)
                (first.children()[0] if prefix else first).terminate()
            assert shell.wait(20 * PATIENCE) == 7, name
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
        assert said.read_text().splitlines() == [
            "torchrun runs", "torchrun got SIGTERM", "torchrun ended",
            "ddpprobe daemon --dir run --node node_0001 --after",
        ]  # fmt: skip


def cluster(tmp_path: Path, *, nodes: int) -> dict[str, str]:
    """Return the environment of a batch script, with Slurm's commands as this machine has them."""
    words = tmp_path / "bin"
    words.mkdir()
    scontrol = "#!/bin/sh\necho 127.0.0.1\n"
    for name, text in (("srun", SRUN), ("scontrol", scontrol), ("torchrun", FORKING)):
        (words / name).write_text(text)
        (words / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "epilog.sh").symlink_to(LAUNCH / "slurm/epilog.sh")
    return os.environ | {
        "PATH": f"{words}:{BIN}:{os.environ['PATH']}",
        "RUNS": str(tmp_path / "runs"),
        "TARGETS": str(tmp_path / "targets"),
        "EPILOG": str(tmp_path / "epilog.sh"),
        "SLURM_JOB_NAME": "gpt", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_GPUS_ON_NODE": "1",
        "DDPPROBE_LINGER": "0", "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def test_the_batch_script_ends_behind_its_daemons_and_prints_the_verdict(tmp_path: Path) -> None:
    environment = cluster(tmp_path, nodes=2)
    done = subprocess.run(
        [LAUNCH / "slurm/train.sbatch"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=120 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^PAGE +step 2 micro 0 +rank 1 .*first cause", done.stdout, re.MULTILINE)
    run = tmp_path / "runs" / f"gpt-{os.getpid()}"
    info = subprocess.run(
        [BIN / "ddpprobe", "info", run], capture_output=True, text=True, check=False
    )
    assert "unsealed" not in info.stdout
    assert not list((tmp_path / "targets").rglob("*.json"))  # no daemon is announced any more


def test_the_epilog_says_what_it_expected(tmp_path: Path) -> None:
    for words, says in (
        ((), "expected the run directory and the number of nodes, got 0 arguments"),
        ((str(tmp_path / "none"), "2"), "none is not there: the job ended before"),
    ):
        done = subprocess.run(
            [LAUNCH / "slurm/epilog.sh", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert says in done.stderr


def test_the_operator_s_rules_are_those_of_prometheus() -> None:
    rule = tree(LAUNCH / "kubernetes/prometheusrule.yml")
    assert rule["spec"] == tree(ROOT / "grafana/rules/ddpprobe.yml")


def test_the_pod_monitor_scrapes_the_pods_of_the_job_set() -> None:
    monitor = tree(LAUNCH / "kubernetes/podmonitor.yml")["spec"]
    (container,) = pod()["spec"]["containers"]
    (port,) = container["ports"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    environment = {e["name"]: e.get("value") for e in container["env"]}
    assert monitor["selector"]["matchLabels"].items() <= pod()["metadata"]["labels"].items()
    assert endpoint["port"] == port["name"]
    assert environment["DDPPROBE_LISTEN"] == f"0.0.0.0:{port['containerPort']}"
    # A label of a pod, as Prometheus spells it, is the one by which the run's directory is named.
    (source,) = endpoint["relabelings"][0]["sourceLabels"]
    (uid,) = (e for e in container["env"] if e["name"] == "JOBSET_UID")
    (label,) = re.findall(r"labels\['(.*)'\]", uid["valueFrom"]["fieldRef"]["fieldPath"])
    assert source == "__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9]", "_", label)
    assert "$(JOBSET_UID)" in environment["DDPPROBE_DIR"]


def test_the_job_set_has_as_many_pods_and_ranks_as_torchrun_is_told() -> None:
    job_set = tree(LAUNCH / "kubernetes/jobset.yml")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert f"--nnodes={job['completions']} " in script
    assert job["parallelism"] == job["completions"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']} " in script
    # JobSet's names of pods: SET-JOB-INDEX OF JOB-INDEX OF POD, in a service called like the set.
    name = job_set["metadata"]["name"]
    assert f"--master-addr={name}-{replicated['name']}-0-0.{name} " in script


def test_compose_takes_its_file() -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("docker"), reason="no docker command")
def test_compose_itself_takes_its_file(tmp_path: Path) -> None:
    there = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if there.returncode != 0:
        pytest.skip("docker has no compose")
    environment = os.environ | {"STACK": str(tmp_path), "DDPPROBE_SD_DIR": str(tmp_path)}
    command = ["docker", "compose", "-f", COMPOSE, "config", "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_the_containers_read_is_what_up_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, targets = tmp_path / "stack", tmp_path / "targets"
    monkeypatch.setenv("DDPPROBE_SD_DIR", str(targets))
    assert main(["up", str(stack), "--no-start"]) == 0
    services = tree(COMPOSE)["services"]
    named = [word for s in services.values() for word in s.get("command", ())]
    named += services["grafana"]["environment"].values()
    read = [re.sub(r".*\$\{STACK[^}]*\}/", "", n) for n in named if "{STACK" in str(n)]
    assert len(read) == 4
    for name in read:
        assert (stack / name).exists(), name
    # All that Prometheus and Grafana are told to read lies in one of the two directories.
    config = tree(stack / "prometheus.yml")
    files = config["rule_files"] + config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    boards = tree(stack / "grafana/provisioning/dashboards/ddpprobe.yml")
    files.append(boards["providers"][0]["options"]["path"])
    mounted = {
        word.rpartition(":")[0].rpartition(":")[2]
        for word in services["prometheus"]["volumes"]
        if word.endswith(":ro")
    }
    assert mounted == {"${STACK}", "${DDPPROBE_SD_DIR}"}
    assert all(Path(f).is_relative_to(stack) or Path(f).is_relative_to(targets) for f in files)
    # Prometheus finds Alertmanager, and Grafana finds Prometheus, where these listen.
    (alertmanager,) = config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert f"--web.listen-address={alertmanager}" in services["alertmanager"]["command"]
    source = tree(stack / "grafana/provisioning/datasources/ddpprobe.yml")["datasources"][0]
    port = source["url"].rpartition(":")[2]
    assert f"--web.listen-address=127.0.0.1:{port}" in services["prometheus"]["command"]
    capsys.readouterr()


def test_the_runbooks_are_where_the_prometheus_of_compose_listens() -> None:
    command = tree(COMPOSE)["services"]["prometheus"]["command"]
    (listen,) = (w.partition("=")[2] for w in command if w.startswith("--web.listen-address="))
    for text in (COMPOSE.read_text(), PAGE):
        assert re.findall(r"--runbook-base (http\S+)", text) == [f"http://{listen}/user"]


def verified(unit: str, home: Path) -> str:
    """Return what systemd says of a user's unit; nothing is good."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze")
    command = home / ".local/bin/ddpprobe"
    if not command.exists():
        command.parent.mkdir(parents=True)
        command.symlink_to(BIN / "ddpprobe")
    (home / "ddpprobe.service").write_text(unit)
    environment = os.environ | {"HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    done = subprocess.run(
        [tool, "verify", "--user", "--man=no", str(home / "ddpprobe.service")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (LAUNCH / "systemd/ddpprobe.service").read_text()
    assert verified(unit, tmp_path) == ""
    assert "Unknown key" in verified(unit.replace("KillMode", "KillModus"), tmp_path)
    assert "not executable" in verified(unit.replace("bin/ddpprobe", "bin/none"), tmp_path)


PAGE = (ROOT / "docs/how-to/clusters.md").read_text()


def block(name: str) -> Any:
    """Return the YAML block of the page that begins with a comment of that name."""
    (found,) = re.findall(rf"^```yaml\n(# {name}:.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(found)


def promtool(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["promtool", "check", "config", *options, str(config)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_prometheus_takes_the_agent_s_configuration_as_an_agent(tmp_path: Path) -> None:
    config, tree = tmp_path / "agent.yml", block("agent.yml")
    tree["remote_write"][0]["authorization"]["credentials_file"] = str(tmp_path / "token")
    (tmp_path / "token").write_text("secret")
    config.write_text(yaml.safe_dump(tree))
    done = promtool(config, "--agent")
    assert done.returncode == 0, done.stdout + done.stderr
    # An agent refuses what it cannot do, so that the check above says something.
    config.write_text(yaml.safe_dump(tree | {"rule_files": ["rules.yml"]}))
    assert promtool(config, "--agent").returncode != 0


def test_the_collector_scrapes_what_prometheus_would(tmp_path: Path) -> None:
    tree = block("collector.yml")
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(tree["receivers"]["prometheus"]["config"]))
    done = promtool(config)
    assert done.returncode == 0, done.stdout + done.stderr
    used = tree["service"]["pipelines"]["metrics"]
    for kind, names in used.items():
        assert set(names) == set(tree[kind]), kind
