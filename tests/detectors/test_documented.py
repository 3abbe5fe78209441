"""The reference of the detectors has a section of each, and says what each cannot tell."""

from __future__ import annotations

import re
from pathlib import Path

from ddpprobe.detectors.suite import DETECTORS

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "detectors.md"


def test_the_section_of_each_detector_says_what_it_cannot_tell() -> None:
    silent = {detector.name for detector in DETECTORS}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        if "\n**What it cannot tell.** " in body:
            silent -= set(re.findall(r"`(\w+)`", heading))
    assert silent == set()
