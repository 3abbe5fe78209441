"""`make test-gpu` works before there is a GPU: it is refused clearly, runs dry, loses nothing."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

from .gpu import install, marked, page, parts, runner
from .gpu.findings import Findings, path_of, table

HOME = Path(__file__).parent.parent
MAIN = HOME / "tests" / "gpu" / "__main__.py"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def command(results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, MAIN, *words], cwd=results, env={**env, "OUT": str(results)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def told(results: Path, part: str) -> dict:
    return json.loads(path_of(results, part).read_text())


# ---- the command


@no_gpu
def test_without_a_cuda_device_it_says_so_and_passes_nothing(tmp_path):
    done = command(tmp_path, "bandwidth")
    assert done.returncode == 3, done.stderr
    assert "NO CUDA DEVICE" in done.stdout
    assert (told(tmp_path, "bandwidth")["status"], told(tmp_path, "bandwidth")["lines"]) == (
        "no CUDA device", [],
    )  # fmt: skip
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["part"] == "bandwidth"


def test_a_dry_run_trains_with_and_without_the_probe_and_is_no_proof_for_a_gpu(tmp_path):
    done = command(tmp_path, "identical", "--device", "cpu", "--case", "fp64")
    assert done.returncode == 0, done.stdout + done.stderr
    found = told(tmp_path, "identical")
    assert found["status"] == "dry run"
    assert [line["result"] for line in found["lines"]] == ["passed", "passed"]
    with pytest.raises(SystemExit, match="no table of a GPU"):
        page.write([tmp_path / "gpu.json"], tmp_path)


def test_no_such_part_is_wrong_use_and_names_those_that_there_are(tmp_path):
    done = command(tmp_path, "identcal")
    assert done.returncode == 2
    assert "no part identcal; there are marked, identical" in done.stderr


# ---- what runs the parts


def test_what_dies_raises_or_hangs_costs_nothing_but_its_own_case(tmp_path, monkeypatch):
    part = parts.Part("cases that break", ())
    monkeypatch.setattr(runner, "PARTS", {**parts.PARTS, "broken_cases": part})
    monkeypatch.setattr(runner, "CASE_SECONDS", 3.0 - runner.GRACE_SECONDS)
    found = runner.run_part("broken_cases", "cpu", tmp_path, [str(HOME)])
    assert found["status"] == "failed"
    assert list(found["seconds"]) == ["raises", "dies", "passes", "hangs"]
    lines = {(line["case"], line["what"]): line for line in found["lines"]}
    assert lines["dies", "before its death"]["result"] == "passed"
    assert "SIGKILL" in lines["dies", "process"]["text"]
    assert lines["raises", "ValueError"]["text"] == "wrong in some way"
    assert lines["hangs", "before it hangs"]["result"] == "passed"
    assert lines["hangs", "process"]["text"] == "killed, 3 s was over"
    assert lines["passes", "a figure"]["values"] == [1.0, 3.0, 2.0]
    assert found == told(tmp_path, "broken_cases")


def test_a_part_without_its_packages_names_them(tmp_path, monkeypatch):
    part = parts.Part("a part", ("json", "no_such_module"))
    monkeypatch.setattr(runner, "PARTS", {"a": part})
    found = runner.run_part("a", "cpu", tmp_path, [str(HOME)])
    assert found["status"] == "packages missing"
    assert found["note"] == "no_such_module: give --wheels DIR"


@pytest.mark.parametrize(
    ("device", "value", "result", "goal"),
    [("cuda", 0.84, "missed", ">= 0.85"), ("cuda", 0.85, "passed", ">= 0.85"),
     ("cpu", 0.84, "passed", "")],
)  # fmt: skip
def test_a_figure_beneath_its_goal_is_missed_and_a_dry_run_has_no_goal(
    tmp_path, device, value, result, goal
):
    findings = Findings(tmp_path / "f.json", "bandwidth", device)
    findings.begin("case")
    findings.figure("share", [value, 0.1, 0.99], least=0.85)
    (line,) = json.loads((tmp_path / "f.json").read_text())["lines"]
    assert (line["result"], line["goal"], line["text"]) == (
        result,
        goal,
        f"{value:.3f} (0.100 to 0.990)",
    )
    findings.end()
    findings.finish()
    assert findings.told["status"] == {"cuda": "passed", "cpu": "dry run"}[device]
    assert "(0.100 to 0.990)" in table([findings.told])


def test_every_file_with_a_test_that_needs_a_gpu_is_a_case():
    words = ("cuda.is_available()", "mark.gpu", "needs_triton")
    own = {Path(__file__).name}
    files = {
        str(f.relative_to(HOME / "tests"))
        for f in (HOME / "tests").rglob("test_*.py")
        if any(word in f.read_text() for word in words) and f.name not in own
    }
    assert files <= set(marked.cases())
    assert "rank/stats/test_device.py" in files


# ---- the folder of wheels


def wheel(folder: Path, name: str, *needs: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-9999-py3-none-any.whl", "w") as file:
        lines = [f"Name: {name}", "Version: 9999", *(f"Requires-Dist: {need}" for need in needs)]
        file.writestr(f"{name}-9999.dist-info/METADATA", "\n".join(lines) + "\n\n")
        file.writestr(f"{name}-9999.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{name}-9999.dist-info/RECORD", "")
        file.writestr(f"{name}.py", "")


def test_of_a_folder_only_what_is_missing_or_too_old_is_installed_and_never_torch(tmp_path):
    needs = (
        "pluggy>=9999",
        "packaging",
        "torch>=9999",
        "numpy>=9999",
        'iniconfig>=9999; extra == "x"',
    )
    wheel(tmp_path, "not_there_at_all", *needs)
    for name in ("pluggy", "packaging", "torch", "numpy", "iniconfig", "nvidia_nccl"):
        wheel(tmp_path, name)
    with install.packages(tmp_path) as path:
        target = Path(path[-1])
        assert {f.stem for f in target.glob("*.py")} == {"not_there_at_all", "pluggy"}
        assert str(target) in sys.path
    assert not target.exists()
    assert str(target) not in sys.path


def test_of_a_source_tree_that_is_not_installed_the_version_is_known_all_the_same(monkeypatch):
    monkeypatch.setattr(install, "installed", lambda name: "")
    with install.packages(None) as path:
        (found,) = metadata.distributions(name="ddpprobe", path=[path[-1]])
        assert found.version == metadata.version("ddpprobe")


# ---- what the documents say


def test_readme_and_page_say_what_the_last_table_says():
    last = page.read()
    assert page.PAGE.read_text() == page.markdown(last), "run python -m tests.gpu.page"
    assert page.README.read_text() == page.readme(page.README.read_text(), last)
    assert (page.NEVER in page.README.read_text()) == (last is None)


def test_a_table_of_a_gpu_becomes_what_passed_failed_and_did_not_run(tmp_path):
    machine = {"words": "16 cores", "device": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0"}
    made = []
    for name, status in (("identical", "passed"), ("waits", "failed"), ("demo", "no CUDA device")):
        one = Findings(path_of(tmp_path, name), name, "cuda").told
        one |= {"status": status, "machine": machine if name != "demo" else {"words": "here"}}
        made.append(copy.deepcopy(one))
    line = {"case": "ddp", "what": "steps", "result": "failed", "text": "a\nwaited | for",
            "trace": ["File /somewhere"]}  # fmt: skip
    made[1]["lines"] = [line, {**line, "case": "plain", "result": "passed"}]
    tables = [tmp_path / "one.json", tmp_path / "another.json"]
    older = {**made[0], "status": "failed"}
    for table_, chosen in zip(tables, ([older, made[1]], [made[0], made[2]]), strict=True):
        words = {"made": "2027-01-02", "device": "cuda", "parts": chosen}
        table_.write_text(json.dumps(words))
    (tmp_path / "docs").mkdir()
    page.write(tables, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert "NVIDIA H200, torch 2.11.0, 2027-01-02" in readme
    assert (
        "passed: identical;\n  failed: waits;\n  did not reach every goal of speed: none;" in readme
    )
    assert "did not run: marked, faults" in readme
    assert "demo ([GPU](docs/gpu.md))." in readme
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert "| ddp | steps | waited \\| for |  | failed |" in text
    assert "Passed: 1 lines of plain." in text
    kept = (tmp_path / "docs" / "gpu.json").read_text()
    assert "somewhere" not in kept
    assert page.markdown(json.loads(kept)) == text
