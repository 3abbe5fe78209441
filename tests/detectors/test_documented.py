"""What pages say of the detectors: a section of each, what each cannot tell, who looks at a NaN."""

from __future__ import annotations

import re
from pathlib import Path

from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.suite import DETECTORS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "detectors.md"
NAMES = {detector.name for detector in DETECTORS}


def test_the_section_of_each_detector_says_what_it_cannot_tell() -> None:
    silent = set(NAMES)
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        if "\n**What it cannot tell.** " in body:
            silent -= set(re.findall(r"`(\w+)`", heading))
    assert silent == set()


def test_the_page_lists_the_detectors_that_do_not_look_beside_a_nan() -> None:
    (said,) = re.findall(r"before are not finite, (.*?) do not look;", PAGE.read_text(), re.DOTALL)
    not_looking = {kind.name for kind in DETECTORS if issubclass(kind, SoundStepsDetector)}
    assert set(re.findall(r"`(\w+)`", said)) == not_looking


def test_the_table_of_the_readme_has_each_detector_as_a_verdict() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## What it finds\n")[2]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    table = [row for row in rows if len(row) == 4]
    told = {name for row in table for name in re.findall(r"`([a-z_]+)`", row[1])}
    assert told == NAMES | {"rank_lost"}
