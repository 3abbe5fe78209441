"""The shape of the house: who may import whom and what, and how large a thing may grow.

`docs/explanation/architecture.md` says why. A new file needs a layer in `LAYERS`.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
PACKAGE = HOME / "ddpprobe"
DOCUMENT = HOME / "docs" / "explanation" / "architecture.md"

# A room is a file or a folder directly below the package. Imports go to the same layer or down.
LAYERS = {
    "codec": 0, "dealing": 0, "destination": 0, "fuse": 0, "hearsay": 0, "inside": 0,
    "layout": 0, "tmpfs": 0, "merge": 0, "processes": 0, "records": 0, "remembered": 0, "slate": 0,
    "torch_private": 0, "view": 0,
    "bucket": 1, "budget": 1, "detectors": 1, "ends": 1, "gather": 1, "heartbeat": 1, "journal": 1,
    "labels": 1, "metrics": 1, "orders": 1, "packs": 1, "pacing": 1,
    "prometheus": 1, "rendezvous": 1, "roster": 1, "sampling": 1, "site_numbers": 1,
    "scribe": 1, "spawn": 1, "spool": 1, "stats": 1, "store": 1, "topology": 1,
    "arguments": 2, "attempts": 2, "enlist": 2, "hooks": 2, "observers": 2, "recorder": 2,
    "responder": 2, "shipping": 2, "steps": 2, "writing": 2,
    "captured": 3, "daemon": 3, "inventory": 3, "probe": 3, "replay": 3,
    "cli": 4, "commands": 4, "report": 4, "testing": 4,
    "__init__": 5,
}  # fmt: skip
# Rooms that may import a library; every other room must do without it.
ONLY_IN = {
    "torch": {
        "arguments", "captured", "enlist", "hooks", "inventory", "probe", "recorder", "rendezvous",
        "stats", "steps", "testing", "topology", "torch_private",
        # What executes a module of a run again; everything else of replay/ must do without.
        *(f"replay/execution{part}.py" for part in ("", "_call", "_model", "_scene", "_verdict")),
        "replay/op_watch.py", "replay/source_line.py",
    },
    "zarr": {"store"},
    "prometheus_client": {"metrics", "prometheus", "daemon/server.py", "replay/scraping.py"},
    "hypercorn": {"daemon"},
    "plotext": {"commands"},
    "rich": {"commands"},
    "jinja2": {"report"}, "markupsafe": {"report"}, "plotly": frozenset(),
    "matplotlib": {"captured"},
    "pyarrow": {"replay/export/parquet.py"},
    "obstore": {"bucket"},
    "triton": {"stats/triton_rows.py", "stats/triton_words.py"},
    **dict.fromkeys(("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"), frozenset()),
}  # fmt: skip
DANGEROUS = {"eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load"}
NO_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
BROAD = {"Exception", "BaseException"}
FILE_LINES, FUNCTION_LINES = 500, 60


@dataclass(frozen=True)
class Source:
    """One parsed file of the package; `name` is its path below the package."""

    name: str
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def run_time_nodes(self) -> Iterator[ast.AST]:
        """Yield all nodes but those under `if TYPE_CHECKING:`."""
        left: list[ast.AST] = [self.tree]
        while left:
            node = left.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                left.extend(node.orelse)
                continue
            yield node
            left.extend(ast.iter_child_nodes(node))

    def imports(self) -> Iterator[tuple[str, list[str]]]:
        """Yield (module, names) of every import that runs."""
        for node in self.run_time_nodes():
            if isinstance(node, ast.Import):
                yield from ((alias.name, []) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield "." * node.level + (node.module or ""), [a.name for a in node.names]


def sources(package: Path) -> list[Source]:
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        name = path.relative_to(package).as_posix()
        found.append(Source(name, len(text.splitlines()), ast.parse(text)))
    return found


@functools.cache
def package() -> list[Source]:
    """Return ddpprobe's own files: to parse them takes seconds of CPU."""
    return sources(PACKAGE)


def inside(source: Source, known: set[str]) -> Iterator[str]:
    """Modules of the package that a file imports, without the `ddpprobe.` in front."""
    for module, names in source.imports():
        if module == "ddpprobe":
            yield from (name if name in known else "__init__" for name in names or [""])
        elif module.startswith("ddpprobe."):
            target = module.removeprefix("ddpprobe.")
            deeper = [f"{target}.{name}" for name in names if f"{target}.{name}" in known]
            yield from deeper or [target]


# ---- the rules: each yields one line per violation


def upward_imports(files: list[Source]) -> Iterator[str]:
    known = {s.module for s in files} | {s.room for s in files}
    for source in files:
        if source.room not in LAYERS:
            yield f"{source.name}: its room has no layer; give it one in LAYERS"
            continue
        for target in inside(source, known):
            layer = LAYERS.get(target.split(".")[0], 0)
            if layer > LAYERS[source.room]:
                yield f"{source.name}: imports {target}, which lies above it"


def relative_imports(files: list[Source]) -> Iterator[str]:
    for source in files:
        if any(module.startswith(".") for module, _ in source.imports()):
            yield f"{source.name}: a relative import hides where it goes"


def import_cycles(files: list[Source]) -> Iterator[str]:
    known = {s.module for s in files}
    graph = {s.module: {t for t in inside(s, known) if t in known} - {s.module} for s in files}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "import cycle: " + " -> ".join(error.args[1])


def strangers(files: list[Source]) -> Iterator[str]:
    for source in files:
        for module, _ in source.imports():
            allowed = ONLY_IN.get(module.split(".")[0])
            if allowed is not None and not {source.room, source.name} & allowed:
                yield f"{source.name}: imports {module}; only {sorted(allowed) or 'nobody'} may"


def dangerous_calls(files: list[Source]) -> Iterator[str]:
    for source in files:
        for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func)
            if name in DANGEROUS:
                yield f"{source.name}:{call.lineno}: calls {name}"
            if any(
                k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords
            ):
                yield f"{source.name}:{call.lineno}: allows pickle"


def broad_handlers(files: list[Source]) -> Iterator[str]:
    """Yield each place that swallows anything; a clean-up that always re-raises does not."""
    for source in files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not reraises(node):
                yield f"{source.name}:{node.lineno}: broad except"
            suppresses = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
            if suppresses and any(is_broad(a) for a in node.args):
                yield f"{source.name}:{node.lineno}: broad suppress"


def is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(k is None or ast.unparse(k).split(".")[-1] in BROAD for k in kinds)


def reraises(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    leaves = (ast.Return, ast.Break, ast.Continue)
    early = any(isinstance(n, leaves) for part in handler.body for n in ast.walk(part))
    return isinstance(last, ast.Raise) and last.exc is None and not early


def sizes(files: list[Source]) -> Iterator[str]:
    for source in files:
        if source.name.split("/")[-1] in NO_NAMES:
            yield f"{source.name}: says nothing about what is in it"
        if source.lines > FILE_LINES:
            yield f"{source.name}: {source.lines} lines, at most {FILE_LINES}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > FUNCTION_LINES:
                    yield f"{source.name}: {node.name} has {lines} lines, at most {FUNCTION_LINES}"


RULES = [
    upward_imports, relative_imports, import_cycles, strangers, dangerous_calls, sizes,
]  # fmt: skip


# ---- the house as it stands


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule):
    assert list(rule(package())) == []


def test_errors_are_swallowed_in_one_place():
    found = list(broad_handlers(package()))
    assert [line.split(":")[0] for line in found] == ["fuse.py"], found


def test_every_room_in_the_map_stands():
    assert {s.room for s in package()} == set(LAYERS)


def test_the_architecture_page_names_every_room_and_nothing_that_is_not_there():
    text = DOCUMENT.read_text()
    named = set(re.findall(r"`([\w/.-]+(?:\.py|\.md|/))`", text))
    gone = [n for n in named if not (PACKAGE / n).exists() and not (HOME / n).exists()]
    assert gone == []
    rooms = {s.room for s in package()} - {"__init__"}
    unnamed = {r for r in rooms if not {f"{r}.py", f"{r}/"} & named}
    assert unnamed == set()


# ---- what an import costs


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [
        ("ddpprobe", "torch zarr numpy"),
        ("ddpprobe.probe", "zarr prometheus_client hypercorn plotext xarray triton obstore"),
        ("ddpprobe.daemon.node", "torch obstore"),
        ("ddpprobe.store.reader", "torch prometheus_client"),
        ("ddpprobe.detectors.suite", "torch zarr prometheus_client"),
        ("ddpprobe.cli", "torch zarr rich jinja2 plotly"),
    ],
)
def test_importing_a_room_does_not_load_what_it_must_do_without(module, not_loaded):
    code = f"import sys, {module}; print(*({{*{not_loaded.split()}}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# ---- the rules bite: a mutant each


@pytest.mark.parametrize(
    ("rule", "files", "says"),
    [
        (upward_imports, {"records.py": "from ddpprobe.probe import x"}, "imports probe"),
        (upward_imports, {"stats/a.py": "import ddpprobe.hooks.eager"}, "imports hooks.eager"),
        (upward_imports, {"stats/a.py": "def f():\n from ddpprobe import hooks", "hooks/a.py": ""},
         "imports hooks"),
        (upward_imports, {"probe.py": "from ddpprobe import install"}, "imports __init__"),
        (upward_imports, {"extras.py": ""}, "extras.py: its room has no layer"),
        (relative_imports, {"stats/a.py": "from . import b"}, "relative"),
        (import_cycles, {"codec.py": "from ddpprobe import layout",
                         "layout.py": "def f():\n import ddpprobe.codec"}, "codec -> layout"),
        (strangers, {"detectors/a.py": "import torch.nn"}, "imports torch.nn"),
        (strangers, {"prometheus.py": "from zarr import Group"}, "imports zarr"),
        (strangers, {"daemon/host.py": "import prometheus_client"}, "imports prometheus_client"),
        (strangers, {"codec.py": "import pickle"}, "only nobody may"),
        (dangerous_calls, {"cli.py": "x = eval('1')"}, "calls eval"),
        (dangerous_calls, {"probe.py": "import torch\ntorch.load('x')"}, "calls torch.load"),
        (dangerous_calls, {"store/a.py": "np.load(p, allow_pickle=True)"}, "allows pickle"),
        (broad_handlers, {"cli.py": "try: f()\nexcept Exception: pass"}, "broad except"),
        (broad_handlers, {"cli.py": "try: f()\nexcept (OSError, Exception): pass"}, "broad except"),
        (broad_handlers, {"cli.py": "try: f()\nexcept: pass"}, "broad except"),
        (broad_handlers, {"cli.py": "with contextlib.suppress(BaseException): f()"}, "suppress"),
        (broad_handlers, {"cli.py": "def g():\n try: f()\n except BaseException:\n  if x: return\n"
                                    "  raise"}, "broad except"),
        (sizes, {"store/utils.py": ""}, "says nothing"),
        (sizes, {"cli.py": "x = 1\n" * 501}, "501 lines"),
        (sizes, {"cli.py": "async def f():\n" + " x = 1\n" * 61}, "f has 61 lines"),
    ],
)  # fmt: skip
def test_a_mutant_is_caught(tmp_path, rule, files, says):
    assert [line for line in rule(plant(tmp_path, files)) if says in line]


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (upward_imports, {"probe.py": "from ddpprobe import topology", "topology.py": ""}),
        (upward_imports, {"__init__.py": "if TYPE_CHECKING:\n from ddpprobe.probe import x"}),
        (strangers, {"stats/a.py": "import torch", "daemon/server.py": "import prometheus_client"}),
        (dangerous_calls, {"probe.py": "model.eval()\nnp.load(p, allow_pickle=False)"}),
        (broad_handlers, {"cli.py": "try: f()\nexcept BaseException:\n g()\n raise"}),
        (broad_handlers, {"cli.py": "try: f()\nexcept OSError: pass"}),
        (sizes, {"cli.py": 'def f():\n """' + "x\n" * 90 + '"""\n' + " x = 1\n" * 60}),
    ],
)
def test_what_is_allowed_passes(tmp_path, rule, files):
    assert list(rule(plant(tmp_path, files))) == []


def plant(root: Path, files: dict[str, str]) -> list[Source]:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return sources(root)
