"""The documents: every relative link of theirs leads to something."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.cli.main import _parsers
from ddpprobe.cli.verbs import VERBS
from ddpprobe.daemon.__main__ import parser
from ddpprobe.records.step import COUNTED_KINDS, IN_TURN, KINDS, STATS

HOME = Path(__file__).parent.parent
PAGES = [*HOME.glob("*.md"), *HOME.glob("docs/**/*.md")]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return what `#...` may name: GitHub's ids of the headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def dead_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(HOME).as_posix())
def test_every_relative_link_leads_somewhere(page):
    assert list(dead_links(page)) == []


def test_every_page_can_be_reached_from_the_readme():
    found, waiting = set(), [HOME / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in found or page.suffix != ".md":
            continue
        found.add(page)
        links = LINK.findall(CODE.sub("", page.read_text()))
        relative = [link.partition("#")[0] for link in links if not re.match(r"\w+:", link)]
        waiting += [(page.parent / link).resolve() for link in relative if link]
    assert {p for p in PAGES if p.parent != HOME and "runbooks" not in p.parts} <= found


def test_a_link_to_nothing_is_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# One thing\n[a](a.md#one-thing) [b](b.md) [c](#two) [d](https://x.y/z)\n")
    assert list(dead_links(page)) == ["b.md", "#two"]


def test_every_page_is_in_the_navigation_of_the_site_once():
    text = (HOME / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.md)$", text, re.MULTILINE)
    there = [page.relative_to(HOME / "docs").as_posix() for page in HOME.glob("docs/**/*.md")]
    assert sorted(listed) == sorted(there)


def test_the_api_page_has_everything_that_the_package_exports():
    page = (HOME / "docs/reference/api.md").read_text()
    named = re.findall(r"^::: ddpprobe\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(set(ddpprobe.__all__) - {"__version__"})


def test_every_variable_that_a_page_names_is_in_the_table_of_variables():
    told = {name for page in PAGES for name in re.findall(r"DDPPROBE_[A-Z_]+", page.read_text())}
    table = (HOME / "docs/reference/python.md").read_text().partition("\n## Environment\n")[2]
    rows = re.findall(r"^\| (`DDPPROBE_.*?) \|", table, re.MULTILINE)
    known = set(re.findall(r"DDPPROBE_[A-Z_]+", " ".join(rows)))
    # This one the processes of ddpprobe give each other.
    assert told - known == {"DDPPROBE_RUN"}


@pytest.mark.parametrize("verb", VERBS)
def test_the_reference_of_a_verb_names_each_of_its_options(verb: str) -> None:
    page = (HOME / "docs/reference/cli.md").read_text()
    row, section = rf"^\| `ddpprobe {verb} .*", rf"^## `{verb}`\n(?:(?!## ).*\n)*"
    told = "".join(re.findall(f"{row}|{section}", page, re.MULTILINE))
    ours = parser() if verb == "daemon" else _parsers(verb)[1][verb]
    shown = [action for action in ours._actions if action.help != argparse.SUPPRESS]
    options = [action.option_strings for action in shown if action.option_strings]
    lacking = [
        names
        for names in options
        if "--help" not in names
        and not any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", told) for name in names)
    ]
    assert lacking == []


def test_the_reference_calls_install_with_its_own_defaults() -> None:
    page = (HOME / "docs/reference/python.md").read_text()
    call = ast.parse(re.findall(r"^probe = (.*?^\))", page, re.MULTILINE | re.DOTALL)[0]).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    told = {str(word.arg): ast.literal_eval(word.value) for word in call.value.keywords}
    known = inspect.signature(ddpprobe.install).parameters.values()
    assert told == {p.name: p.default for p in known if p.default is not p.empty}


@pytest.mark.parametrize("of", [ddpprobe.Run, ddpprobe.Probe], ids=lambda of: of.__name__)
def test_the_reference_names_what_a_run_and_a_probe_can_do(of: type) -> None:
    page = (HOME / "docs/reference/python.md").read_text()
    methods = [name for name, _ in inspect.getmembers(of, callable) if not name.startswith("_")]
    assert [n for n in methods if not re.search(rf"[`.]{n}\(", page)] == []


def test_the_pages_of_sites_name_every_kind_and_every_statistic():
    trace = (HOME / "docs/reference/cli.md").read_text().partition("\n## `trace`\n")[2]
    trace = trace.partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", trace)) >= {*KINDS, *STATS}
    served = (HOME / "docs/reference/metrics.md").read_text()
    lasting = ", ".join(kind for kind in KINDS if kind not in IN_TURN)
    assert f"`kind` is, in the metrics of sites (tier B), one of {lasting};" in served
    assert f"`ddpprobe_nonfinite_elements_total` one of {', '.join(COUNTED_KINDS)};" in served


def test_no_code_in_a_table_shows_a_backslash_before_a_bar():
    """GitHub drops it there; the site shows it, and a reader types it."""
    shown = [
        (page.name, code)
        for page in PAGES
        for line in page.read_text().splitlines()
        if line.startswith("|")
        for code in re.findall(r"`[^`]+`", line)
        if r"\|" in code
    ]
    assert shown == []


def test_no_table_of_a_page_has_an_empty_head():
    """The site draws it: an empty bar above the table."""
    heads = [
        (page.name, line)
        for page in PAGES
        for line, rule in pairwise(page.read_text().splitlines())
        if rule.startswith("|--") and not line.strip("| ")
    ]
    assert heads == []


def test_the_style_of_the_site_is_built_into_it():
    named = re.findall(r"^extra_css: \[(.*)\]$", (HOME / "mkdocs.yml").read_text(), re.MULTILINE)
    assert named == ["extra.css"]
    assert "td:first-child:has(code)" in (HOME / "docs/extra.css").read_text()
