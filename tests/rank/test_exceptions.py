"""What is said of the exception that ends a rank."""

from __future__ import annotations

import pytest

from ddpprobe.records.fate import cut


@pytest.mark.parametrize(
    ("text", "most", "told"),
    [
        ("as long as it may be", 20, "as long as it may be"),
        ("was transferred incorrectly, or", 28, "was transferred..."),
        ("was transferred incorrectly now", 30, "was transferred incorrectly..."),
        ("is corrupted. This", 17, "is corrupted..."),
        ("x" * 400, 300, "x" * 297 + "..."),
        ("a " + "x" * 400, 300, "a " + "x" * 295 + "..."),
    ],
)
def test_a_text_that_is_cut_says_so_and_ends_with_a_word(text, most, told) -> None:
    assert cut(text, most) == told
    assert len(cut(text, most)) <= most
