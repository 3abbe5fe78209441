"""A release is what its tag says; its workflows call what is there; its wheel is whole."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import ddpprobe

from . import release, wheel

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository that is ready to be released as 1.2.3."""
    (tmp_path / "ddpprobe").mkdir()
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nversion = "1.2.3"\n[project.urls]\nSource = "https://example.org"\n'
    )
    (tmp_path / "ddpprobe/__init__.py").write_text('import os\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n## 1.2.3 - 2026-01-01\n\n- x\n")
    return tmp_path


def test_what_says_one_version_everywhere_may_be_released(tree: Path) -> None:
    assert list(release.problems("v1.2.3", tree)) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "ddpprobe/__init__.py", "CHANGELOG.md"])
def test_a_file_that_was_forgotten_is_named(tree: Path, name: str) -> None:
    path = tree / name
    path.write_text(path.read_text().replace("1.2.3", "1.2.2"))
    (problem,) = release.problems("v1.2.3", tree)
    assert problem.startswith(name)
    assert "1.2.3" in problem


def test_a_release_says_where_the_project_lives(tree: Path) -> None:
    (tree / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (problem,) = release.problems("v1.2.3", tree)
    assert "[project.urls]" in problem


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "v1.2.3-final", "main", ""])
def test_a_tag_of_another_form_is_refused(tree: Path, tag: str) -> None:
    (problem,) = release.problems(tag, tree)
    assert "expected a tag like v1.2.3" in problem


def test_the_version_is_said_twice_and_the_same() -> None:
    about_version = [p for p in release.problems(f"v{ddpprobe.__version__}") if "version" in p]
    assert about_version == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_one(path: Path) -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [tool, "--builtin-schema", "vendor.github-workflows", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_calls_is_there(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands:
        called = re.findall(r"\bmake ([\w-]+)", command)
        scripts = re.findall(r"\bpython (\S+\.py)", command)
        assert called or scripts, command
        assert set(called) <= targets
        assert all((ROOT / script).is_file() for script in scripts)


def test_only_the_job_that_publishes_may_speak_for_the_repository() -> None:
    for path in WORKFLOWS:
        tree = yaml.safe_load(path.read_text())
        assert tree["permissions"] == {"contents": "read"}
        allowed = {name: job.get("permissions") for name, job in tree["jobs"].items()}
        writes = {name for name, rights in allowed.items() if rights}
        assert writes <= {"publish"}


def test_the_wheel_is_tried_with_every_extra() -> None:
    assert wheel.extras().keys() == wheel.USES.keys()
    assert wheel.SAYS_WITHOUT.issubset(wheel.USES)


def test_the_list_of_what_a_release_is_installed_with_has_every_extra_but_torch() -> None:
    (named,) = re.findall(r"^SBOM_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(named.split(",")) == wheel.extras().keys() - {"train"}


def test_what_a_wheel_lacks_or_has_too_much_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*wheel.DATA[1:], "tests/test_x.py"):
            archive.writestr(name, "")
    assert wheel.wrong_inside(path) == [
        f"the wheel lacks {wheel.DATA[0]}",
        "the wheel holds tests/test_x.py",
    ]
