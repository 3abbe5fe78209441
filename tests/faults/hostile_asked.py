"""What is asked of a hostile run, by every verb that reads, and how each must answer."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from ddpprobe.cli import main
from ddpprobe.errors import PackDamaged, RunError, StoreDamaged, TensorError
from ddpprobe.reader import run as replay_run
from ddpprobe.reader.export import job
from tests.faults.hostile_captures import KEPT, MODULE, STORED

SECONDS = 30.0  # of CPU time, for what takes a tenth: other work beside it does not count
MOST_BYTES = 64 << 20  # of a tensor: who asks for a larger one gets it
HARMFUL = ("exec", "compile", "pickle.find_class", "socket.connect", "socket.bind", "os.system",
           "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "ctypes.dlopen",
           "marshal.loads", "os.remove", "os.rename", "os.truncate",
           "os.mkdir", "open")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
TEMPLATE = re.compile(r".*ddpprobe/report/[a-z_]+\.html|<template>")
REPLACING = re.compile(r"\.[\w.]+\.[0-9a-f]{16}")  # before it has its name
CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# RUN stands for the hostile run, GOOD for one that is as it should be, OUT for a directory.
QUICK = (
    "info RUN", "info RUN --json", "anomalies RUN", "anomalies RUN --json", "trace RUN --site *",
    "trace RUN --site * --rank 1 --stat nan --json", "verify RUN",
)  # fmt: skip
MORE = (
    "verify RUN --json", "report RUN -o OUT/page.html", "export RUN --format csv",
    "export RUN --format csv --rank all -o OUT/all.csv --json", "export RUN --format openmetrics",
    "export RUN --format parquet -o OUT/run.parquet", "export RUN --format blocks -o OUT/blocks",
    "compare RUN RUN", "compare RUN GOOD", "compare GOOD RUN --json", "replay RUN",
    "replay RUN --detector grad_spike --set window=4 --json", "top RUN --once", "top RUN --json",
)  # fmt: skip
WITH_TORCH = tuple(
    f"replay RUN --step {step} --module {MODULE} --build tests.faults.hostile_asked:build{more}"
    for _, step in (STORED, KEPT)
    for more in ("", " --json --rank 1 --no-float64")
)


def build() -> Any:
    """Return a module that fits what was captured."""
    import torch

    return torch.nn.Linear(7, 5, bias=False)


class Heard:
    """Audit events that no reading verb has a reason for.

    Args:
        out: the directory in which something may be written.
    """

    def __init__(self, out: Path) -> None:
        self._out, self.events = str(out), list[str]()
        self.listens = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Take an event; an audit hook stays for good, so it is to be quick."""
        if self.listens and event in HARMFUL and not self._is_ours(event, args):
            self.events.append(f"{event} {str(args)[:80]}")

    def _is_ours(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            quiet = not (args[2] or 0) & WRITES or REPLACING.fullmatch(str(args[0]))
            return bool(quiet) or self._is_inside(_path_of(args[0]))
        if event in {"os.rename", "os.remove"} and REPLACING.fullmatch(str(args[0])):
            # The event of `open` does not tell the directory; these do.
            return self._is_inside(_path_of(args[-1]))
        if event in {"compile", "exec"}:  # of the page's template
            name = getattr(args[0], "co_filename", None) or args[1]
            return isinstance(name, str) and TEMPLATE.fullmatch(name) is not None
        return event.startswith("os.") and args and self._is_inside(args[0])

    def _is_inside(self, path: object) -> bool:
        return str(path).startswith((self._out, os.devnull))


def _path_of(opened: object) -> object:
    """Return the path of a descriptor, and anything else as it is."""
    return os.readlink(f"/proc/self/fd/{opened}") if isinstance(opened, int) else opened


class Terminal(io.TextIOWrapper):
    """A standard output that somebody looks at."""

    def isatty(self) -> bool:
        """Say so."""
        return True


class Tags(HTMLParser):
    """Counts the tags of a page, and finds the attributes that run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = dict[str, int]()
        self.handlers = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count it."""
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.handlers += [k for k, v in attrs if k.startswith("on") or "javascript:" in (v or "")]


def active(page: str) -> list[str]:
    """Return what in a page may do something, and is not always there."""
    found = Tags()
    # The longest script is plotly's.
    scripts = sorted(re.findall("<script[^>]*>(.*?)</script>", page, re.DOTALL), key=len)
    found.feed(page.replace(scripts[-1], ""))
    expected = {"script": 3, "iframe": 0, "img": 0, "object": 0, "embed": 0, "form": 0, "base": 0}
    tags = {t: n for t, n in found.tags.items() if n > expected.get(t, n)}
    return [*(f"{n} <{t}>" for t, n in tags.items()), *found.handlers]


def verbs(
    words: Iterable[str], run: Path, good: Path, out: Path
) -> Iterator[tuple[str, list[str]]]:
    """Yield command lines, each with what to call it."""
    known = {"RUN": str(run), "GOOD": str(good)}
    for line in words:
        yield line, [known.get(w, w.replace("OUT", str(out))) for w in line.split()]


def answer(line: str, argv: list[str], out: Path) -> tuple[int, list[str]]:
    """Run a verb; return its exit code, and what is not as it must be."""
    said, err = Terminal(io.BytesIO(), "utf-8", newline=""), io.StringIO()
    started, problems, code = time.process_time(), list[str](), -1
    # `export` writes bytes; promtool only takes what it writes.
    blocks = mock.patch.object(job, "make_blocks", return_value=0)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(err), blocks:
        try:
            code = main.main(argv)
        except Exception as error:  # noqa: BLE001  (the finding)
            problems.append(f"raised {type(error).__name__}: {error} {_place(error)}")
        said.flush()
    if time.process_time() - started > SECONDS:
        problems.append(f"took {time.process_time() - started:.0f} s of CPU time")
    text = said.buffer.getvalue().decode()  # type: ignore[attr-defined]
    problems += _wrong_words(code, text, err.getvalue())
    for path in sorted(out.glob("*.csv")):
        problems += _wrong_words(code, path.read_text(), err.getvalue())
    for path in sorted(out.glob("*.html")):
        problems += [f"an active page: {what}" for what in active(path.read_text())]
    return code, problems


def _wrong_words(code: int, text: str, complaints: str) -> Iterator[str]:
    """Yield what is wrong with an exit code and what was said."""
    bad = {c for c in {*text, *complaints} - {"\n"} if unicodedata.category(c) in CONTROL}
    if bad:
        yield f"lets control characters through: {sorted(map(hex, map(ord, bad)))}"
    if code not in {-1, 0, 1, 2, 3, 4}:
        yield f"exits with {code}"
    lost = "ddpprobe: lost: " in complaints
    if (code == 3) != lost and not (code == 3 and complaints):
        yield f"exits with {code}, and {'lists' if lost else 'does not list'} what is lost"
    if code == 4 and "ddpprobe: not known: " not in complaints:
        yield "exits with 4, and does not list what is not known"
    if code == 2 and not complaints.startswith(("ddpprobe: ", "usage: ")):
        yield f"exits with 2 and says {complaints[:200]!r}"


def _place(error: BaseException) -> str:
    trace, at = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        at = f"{Path(name).name}:{trace.tb_lineno}" if "/ddpprobe/" in name else at
        trace = trace.tb_next
    return at


def ask(run: Path) -> list[str]:
    """Ask `Run` itself for what is captured and read; return what is not as it must be."""
    try:
        opened = replay_run.open_run(run)
        for captured in opened.captures():
            for site in captured.sites[:20]:
                _tensor(opened, site, captured)
            for module in captured.modules[:20]:
                for stored_call in opened.capsules(captured.step, module, captured.attempt):
                    assert all(t.shape is not None for t in stored_call.tensors.values())
        assert sum(1 for _ in opened.readings()) >= 0
        opened.expired()
    except RunError:
        return []
    except (TensorError, StoreDamaged, PackDamaged):
        return []
    except Exception as error:  # noqa: BLE001  (the finding)
        return [f"Run raised {type(error).__name__}: {error} {_place(error)}"]
    return []


def _tensor(run: replay_run.Run, site: str, captured: Any) -> None:
    with contextlib.suppress(TensorError, StoreDamaged, PackDamaged):
        tensor = run.tensor(site, captured.step, captured.attempt)
        for rank in tensor.ranks[:4]:
            size = tensor.dtype.itemsize
            for n in tensor.local_shape(rank):
                size *= n
            if size <= MOST_BYTES:
                tensor.rank(rank)
                tensor[...]


def problems_of(
    run: Path, good: Path, outside: Path, name: str, heard: Heard, lines: tuple[str, ...]
) -> Iterator[str]:
    """Ask everything; yield what is not as it must be."""
    codes: dict[str, int] = {}
    canaries = [p for p in (outside, *outside.rglob("*")) if not p.is_symlink()]
    for path in canaries:
        os.utime(path, (0, path.stat().st_mtime))
    for at, (line, argv) in enumerate(verbs(lines, run, good, Path(heard._out))):
        with tempfile.TemporaryDirectory(dir=heard._out) as out:
            words = [w.replace(heard._out, out) for w in argv]
            heard.events, heard.listens = [], True
            codes[line], found = answer(line, words, Path(out))
            found += ask(run) if at == 0 else []
            heard.listens = False
        yield from (f"{line}: {what}" for what in (*found, *sorted(set(heard.events))))
    followed = [str(p) for p in canaries if p.stat().st_atime > 1]
    if followed:
        yield f"read outside of the run: {followed[:3]}"
    yield from _unheard(name, codes)


# What is not damage, or of which nobody is told: a link in the place of what is optional.
UNSEEN = ("run.lock", "daemon/", "heartbeat/", "odd ", "link journal", "many rows", "many sites",
          "link captures", "names", "a million ranks", "many tensors")  # fmt: skip


def _unheard(name: str, codes: dict[str, int]) -> Iterator[str]:
    if codes.get("verify RUN", 3) not in (2, 3) and not any(word in name for word in UNSEEN):
        yield f"verify finds nothing: {codes}"


GROUPS = {"quick": QUICK, "more": (*QUICK, *MORE), "torch": WITH_TORCH}
