"""The shape of the house: who may import whom and what, and how large a thing may grow.

The rooms are the folders and files directly below `ddpprobe/`. `docs/explanation/architecture.md`
lists them with what each may import; a new room, or a new arrow between two, is a line there.
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
PACKAGE = HOME / "ddpprobe"
DOCUMENT = HOME / "docs" / "explanation" / "architecture.md"
# | `room/` | what is in it | `a/` `b/` |
ROW = re.compile(r"^\| `(\w+)(?:/|\.py)` \|[^|]*\| ([^|]*) \|$", re.MULTILINE)

# Where a library may be imported; everything else must do without it.
ONLY_IN = {
    "torch": ("rank", "inspect", "probe.py", "testing", "reader/reexecute", "integrations"),
    "zarr": ("store",),
    "prometheus_client": ("metrics", "daemon/server.py", "reader/live/live_from_metrics.py"),
    "hypercorn": ("daemon",),
    "plotext": ("cli/commands",), "rich": ("cli",), "argcomplete": ("cli/completion.py",),
    "jinja2": ("report",), "markupsafe": ("report",), "plotly": (),
    "matplotlib": (
        "inspect/capture", "reader/run_numbers.py", "reader/series_plot.py",
        "reader/histograms.py", "reader/histogram_plot.py",
    ),
    "pandas": ("reader/run_numbers.py", "reader/dataframes.py"),
    "polars": ("reader/run_numbers.py", "reader/dataframes.py"),
    "dask": ("reader/lazy_dataset.py",),
    "pyarrow": ("reader/export/parquet.py", "store/overview_writer.py"),
    "obstore": ("store/remote/bucket.py",),
    "transformers": ("integrations/huggingface.py",),
    "accelerate": ("integrations/huggingface.py", "integrations/accelerate.py"),
    "lightning": ("integrations/lightning.py", "integrations/fabric.py"),
    "pytorch_lightning": ("integrations/lightning.py",),
    "ray": ("integrations/ray.py",), "deepspeed": ("integrations/deepspeed.py",),
    "triton": ("rank/stats/triton_rows.py", "rank/stats/triton_words.py"),
    **dict.fromkeys(("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"), ()),
}  # fmt: skip
DANGEROUS = {"eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load"}
NO_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
BROAD = {"Exception", "BaseException"}
FILE_LINES, MEDIAN_LINES, FUNCTION_LINES = 500, 150, 60


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

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree: every rule looks at them, and to walk it takes as long as that."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> list[tuple[str, list[str]]]:
        """(module, names) of every import, those for the type checker included."""
        found: list[tuple[str, list[str]]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += ((alias.name, []) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.append(("." * node.level + (node.module or ""), [a.name for a in node.names]))
        return found


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
    for module, names in source.imports:
        if module == "ddpprobe":
            yield from (name if name in known else "__init__" for name in names or [""])
        elif module.startswith("ddpprobe."):
            target = module.removeprefix("ddpprobe.")
            deeper = [f"{target}.{name}" for name in names if f"{target}.{name}" in known]
            yield from deeper or [target]


# ---- the rules: each yields one line per violation


def arrows(files: list[Source]) -> dict[tuple[str, str], str]:
    """Return which room imports which, each with one file that does."""
    known = {s.module for s in files}
    found = {}
    for source in files:
        for target in inside(source, known):
            room = target.split(".")[0]
            if room not in {source.room, "__init__"}:
                found[source.room, room] = source.name
    return found


def told_rooms(page: str) -> dict[str, set[str]]:
    """Return the rooms that the page lists, each with the rooms that it may import."""
    return {
        room: {name.removesuffix("/").removesuffix(".py") for name in re.findall("`([^`]+)`", may)}
        for room, may in ROW.findall(page)
    }


def untold_arrows(files: list[Source], told: Mapping[str, set[str]]) -> Iterator[str]:
    found = arrows(files)
    for (room, target), file in sorted(found.items()):
        if target not in told.get(room, set()):
            yield f"{file}: {room} imports {target}; if it must, say so in {DOCUMENT.name}"
    for room, may in told.items():
        yield from (
            f"{room} does not import {t} any more" for t in sorted(may) if (room, t) not in found
        )


def room_circles(files: list[Source]) -> Iterator[str]:
    """Yield a circle between what lies directly in one folder, for each folder that has one."""
    known = {s.module for s in files}
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source in files:
        here = source.module.split(".")
        for target in inside(source, known):
            there = target.split(".")
            shared = next(
                (i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None
            )
            if shared is not None:
                graphs[".".join(here[:shared])][here[shared]].add(there[shared])
    for folder, graph in sorted(graphs.items()):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"{folder or 'ddpprobe'}: " + " -> ".join(error.args[1])


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the classes, functions and methods of a file: `run`, `Run`, `Run.anomalies`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)
            )


def relative_imports(files: list[Source]) -> Iterator[str]:
    for source in files:
        if any(module.startswith(".") for module, _ in source.imports):
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
        for module, _ in source.imports:
            allowed = ONLY_IN.get(module.split(".")[0])
            if allowed is not None and not any(
                source.name == place or source.name.startswith(f"{place}/") for place in allowed
            ):
                yield f"{source.name}: imports {module}; only {list(allowed) or 'nobody'} may"


def dangerous_calls(files: list[Source]) -> Iterator[str]:
    for source in files:
        for call in (n for n in source.nodes if isinstance(n, ast.Call)):
            name = dotted(call.func)
            if name in DANGEROUS:
                yield f"{source.name}:{call.lineno}: calls {name}"
            if any(
                k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords
            ):
                yield f"{source.name}:{call.lineno}: allows pickle"


def dotted(node: ast.expr) -> str:
    """Return a name with dots, "" of any other expression: to write each one out takes seconds."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def broad_handlers(files: list[Source]) -> Iterator[str]:
    """Yield each place that swallows anything; a clean-up that always re-raises does not."""
    for source in files:
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not reraises(node):
                yield f"{source.name}:{node.lineno}: broad except"
            suppresses = isinstance(node, ast.Call) and dotted(node.func).endswith("suppress")
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
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                told = ast.get_docstring(node, clean=False) is not None
                body = node.body[1:] if told else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > FUNCTION_LINES:
                    yield f"{source.name}: {node.name} has {lines} lines, at most {FUNCTION_LINES}"


def double_names(files: list[Source]) -> Iterator[str]:
    """Yield each public class name with more than one meaning; private ones are free."""
    homes = defaultdict(list)
    for source in files:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(f"{source.name}:{node.lineno}")
    for name, places in sorted(homes.items()):
        if len(places) > 1:
            yield f"{name} is the name of {len(places)} classes: {', '.join(places)}"


RULES = [
    room_circles, relative_imports, import_cycles, strangers, dangerous_calls, sizes, double_names,
]  # fmt: skip


# ---- the house as it stands


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule):
    assert list(rule(package())) == []


def test_errors_are_swallowed_in_one_place():
    found = list(broad_handlers(package()))
    assert [line.split(":")[0] for line in found] == ["rundir/fuse.py"], found


def test_most_files_are_short():
    assert statistics.median(s.lines for s in package()) <= MEDIAN_LINES


def test_the_architecture_page_lists_every_room_with_what_it_imports():
    told = told_rooms(DOCUMENT.read_text())
    assert set(told) == {s.room for s in package()}
    assert list(untold_arrows(package(), told)) == []


def test_the_architecture_page_names_nothing_that_is_not_there():
    named = set(re.findall(r"`([\w/.-]+(?:\.py|\.md|/))`", DOCUMENT.read_text()))
    assert [n for n in named if not (PACKAGE / n).exists() and not (HOME / n).exists()] == []


def test_the_walks_on_the_architecture_page_name_what_stands_in_those_files():
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", DOCUMENT.read_text())
    files = {source.name: set(definitions(source.tree)) for source in package()}
    assert len(named) > 20
    assert [(file, name) for file, name in named if name not in files[file]] == []


def test_at_most_18_names_stand_in_the_package():
    assert len({s.room for s in package()}) <= 18


# ---- what an import costs


# What is imported, one after the other in one process, and what must not be loaded by then.
LIGHT = {
    "ddpprobe": "torch zarr numpy",
    "ddpprobe.detectors.suite": "torch zarr prometheus_client",
    "ddpprobe.reader.run": "torch zarr numcodecs",
    "ddpprobe.cli.main": "torch zarr rich jinja2 plotly",
}
STORED = {
    "ddpprobe.store.reader": "torch prometheus_client",
    "ddpprobe.daemon.node": "torch obstore",
}
TRAINING = {
    "torch, numpy, psutil": "ddpprobe",
    "ddpprobe.probe": "zarr prometheus_client hypercorn plotext xarray triton obstore",
    "ddpprobe.integrations": "transformers accelerate lightning ray deepspeed",
}


@functools.cache
def loaded(*modules: str) -> dict[str, set[str]]:
    """Return all that is loaded after each of these imports: torch alone takes three seconds."""
    code = "import sys\n" + "".join(f"import {name}\nprint(*sys.modules)\n" for name in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(modules, map(set, map(str.split, done.stdout.splitlines())), strict=True))


@pytest.mark.parametrize(
    ("process", "module"),
    [(process, module) for process in (LIGHT, STORED, TRAINING) for module in process],
)
def test_importing_a_room_does_not_load_what_it_must_do_without(process, module):
    assert loaded(*process)[module] & {*process[module].split()} == set()


def test_the_training_process_imports_only_torch_numpy_and_psutil():
    before, after = (loaded(*TRAINING)[name] for name in [*TRAINING][:2])
    new = {module.partition(".")[0] for module in after - before}
    assert new - set(sys.stdlib_module_names) - {"torch", "numpy", "psutil"} == {"ddpprobe"}


# ---- the rules bite: a mutant each


@pytest.mark.parametrize(
    ("rule", "files", "says"),
    [
        (room_circles, {"records/a.py": "from ddpprobe.rank.b import x", "rank/b.py": "",
                        "rank/c.py": "import ddpprobe.records.a"}, "ddpprobe: "),
        (room_circles, {"records/a.py": "if TYPE_CHECKING:\n from ddpprobe.rank import b",
                        "rank/b.py": "def f():\n from ddpprobe.records import a"}, "ddpprobe: "),
        (room_circles, {"rank/hooks/a.py": "from ddpprobe.rank.capture import b",
                        "rank/capture/b.py": "", "rank/capture/c.py":
                        "from ddpprobe.rank.hooks.a import x"}, "rank: "),
        (relative_imports, {"stats/a.py": "from . import b"}, "relative"),
        (import_cycles, {"rundir/a.py": "from ddpprobe.rundir import b",
                         "rundir/b.py": "def f():\n import ddpprobe.rundir.a"}, "a -> rundir.b"),
        (strangers, {"detectors/a.py": "import torch.nn"}, "imports torch.nn"),
        (strangers, {"metrics/a.py": "from zarr import Group"}, "imports zarr"),
        (strangers, {"daemon/host.py": "import prometheus_client"}, "imports prometheus_client"),
        (strangers, {"rundir/a.py": "import pickle"}, "only nobody may"),
        (dangerous_calls, {"cli.py": "x = eval('1')"}, "calls eval"),
        (dangerous_calls, {"probe.py": "import torch\ntorch.load('x')"}, "calls torch.load"),
        (dangerous_calls, {"store/a.py": "np.load(p, allow_pickle=True)"}, "allows pickle"),
        (broad_handlers, {"cli.py": "try: f()\nexcept Exception: pass"}, "broad except"),
        (broad_handlers, {"cli.py": "try: f()\nexcept (OSError, Exception): pass"}, "broad except"),
        (broad_handlers, {"cli.py": "try: f()\nexcept: pass"}, "broad except"),
        (broad_handlers, {"cli.py": "with contextlib.suppress(BaseException): f()"}, "suppress"),
        (broad_handlers, {"cli.py": "def g():\n try: f()\n except BaseException:\n  if x: return\n"
                                    "  raise"}, "broad except"),
        (double_names, {"rank/a.py": "class Table: ...", "store/b.py": "class Table: ..."},
         "Table is the name of 2 classes: rank/a.py:1, store/b.py:1"),
        (double_names, {"rank/a.py": "class Table: ...\nclass B:\n class Table: ..."}, "Table is"),
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
        (
            room_circles,
            {
                "rank/hooks/a.py": "import ddpprobe.rank.c",
                "rank/c.py": "",
                "rank/d.py": "import ddpprobe.rank.hooks.a",
            },
        ),
        (
            strangers,
            {"rank/stats/a.py": "import torch", "daemon/server.py": "import prometheus_client"},
        ),
        (dangerous_calls, {"probe.py": "model.eval()\nnp.load(p, allow_pickle=False)"}),
        (broad_handlers, {"cli.py": "try: f()\nexcept BaseException:\n g()\n raise"}),
        (double_names, {"rank/a.py": "class _Table: ...", "store/b.py": "class _Table: ..."}),
        (broad_handlers, {"cli.py": "try: f()\nexcept OSError: pass"}),
        (sizes, {"cli.py": 'def f():\n """' + "x\n" * 90 + '"""\n' + " x = 1\n" * 60}),
    ],
)
def test_what_is_allowed_passes(tmp_path, rule, files):
    assert list(rule(plant(tmp_path, files))) == []


def test_an_arrow_that_the_page_does_not_tell_is_caught_and_so_is_one_that_is_gone(tmp_path):
    page = "| `records/` | a | - |\n| `rank/` | b | `records/` |\n| `probe.py` | c | `rank/` |"
    told = told_rooms(page)
    assert told == {"records": set(), "rank": {"records"}, "probe": {"rank"}}
    files = {"rank/a.py": "import ddpprobe.records.b", "records/b.py": "", "probe.py": ""}
    assert list(untold_arrows(plant(tmp_path, files), told)) == [
        "probe does not import rank any more"
    ]
    files = {"probe.py": "import ddpprobe.rank.a\nimport ddpprobe.records.b"}
    assert [line.split(";")[0] for line in untold_arrows(plant(tmp_path, files), told)] == [
        "probe.py: probe imports records"
    ]


def plant(root: Path, files: dict[str, str]) -> list[Source]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return sources(root)
