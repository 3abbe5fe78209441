"""The list of mutants that survive is about the code that is there, and a new one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import tool
from tests.mutants.__main__ import draw
from tests.mutants.known import Known, judge, load
from tests.mutants.rooms import ROOMS
from tests.mutants.tool import UNTESTED, Mutant, described

HOME = Path(__file__).parent.parent
SHOWN = """# ddpprobe.records.merge.xǁGatherǁ_put__mutmut_3: survived
--- ddpprobe/records/merge.py
+++ ddpprobe/records/merge.py
@@ -1,4 +1,4 @@
 def _put(self) -> int:
-        return a - b
+        return a + b
"""
SURVIVOR = Mutant("name", "survived", "merge.f", "a - b", "a + b")


def test_every_room_has_its_files_and_its_tests() -> None:
    for room in ROOMS.values():
        assert all(list(HOME.glob(pattern)) for pattern in room.files)
        assert all((HOME / "tests" / name).exists() for name in room.tests)


def test_every_listed_survivor_is_a_change_of_lines_that_are_there() -> None:
    files = {p for room in ROOMS.values() for f in room.files for p in HOME.glob(f)}
    texts = {
        ".".join(p.relative_to(HOME / "ddpprobe").with_suffix("").parts): p.read_text()
        for p in files
    }
    for known in load():
        (text,) = (t for module, t in texts.items() if known.where.startswith(f"{module}."))
        lines = {line.strip() for line in text.splitlines()}
        assert set(known.was.splitlines()) <= lines, f"{known.where} does not read like this now"


def test_a_mutant_is_known_by_the_lines_that_it_changes() -> None:
    mutant = described("ddpprobe.records.merge.xǁGatherǁ_put__mutmut_3", "survived", SHOWN)
    assert (mutant.where, mutant.was, mutant.now) == (
        "records.merge.Gather._put", "return a - b", "return a + b",
    )  # fmt: skip
    function = described("ddpprobe.detectors.groups.x__of__mutmut_12", "killed", SHOWN)
    assert function.where == "detectors.groups._of"
    assert [mutant.survived, function.survived] == [True, False]


def test_survivors_are_new_listed_or_equivalent() -> None:
    listed = Known("merge.f", "a reason", "a - b", "a + b")
    same = Known("merge.f", "a reason", "a - b", "a + b", equivalent=True)
    unheard = Known("merge.g", "a reason")
    other = Mutant("other", "survived", "merge.g", "x", "y")
    nobody = Mutant("nobody", UNTESTED, "merge.g", "x", "y")
    verdict = judge(10, [SURVIVOR, other, nobody], [listed, unheard])
    assert (verdict.new, verdict.listed, verdict.killed) == ((other,), (SURVIVOR, nobody), 7)
    assert verdict.rate == 0.7
    assert judge(10, [SURVIVOR], [same]).rate == 1.0
    assert judge(10, [SURVIVOR], []).new == (SURVIVOR,)
    assert judge(0, [], []).rate == 0.0  # nothing was tried, so nothing is shown


@pytest.mark.parametrize(
    "text", ['[[survivor]]\nwhere = "a.b"', '[[survivor]]\nwhere = "a.b"\nwhy = "x"\nold = "y"']
)
def test_an_entry_without_a_reason_or_with_an_unknown_word_is_refused(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "survivors.toml").write_text(text)
    with pytest.raises(ValueError, match="an entry has `where` and `why`, and may have"):
        load(tmp_path / "survivors.toml")


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    names = {f"m{n}": "not checked" for n in range(50)}
    assert draw(names, 5, 1) == draw(names, 5, 1) != draw(names, 5, 2)
    assert draw(names, None, 1) == draw(names, 99, 1) == sorted(names)


def test_a_test_that_has_changed_is_asked_anew_what_it_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "COPIES", tmp_path)
    workshop = tool.Workshop("gather", ROOMS["gather"])
    known = tmp_path / "gather" / "mutants" / "mutmut-stats.json"
    test = tmp_path / "gather" / "tests" / "test_a.py"
    for folder in (known.parent, test.parent):
        folder.mkdir(parents=True)
    for text, stays in (("1", False), ("1", True), ("2", False), ("2", True)):
        test.write_text(text)
        known.write_text("{}")
        workshop._forget_who_reaches_what()
        assert known.exists() is stays
