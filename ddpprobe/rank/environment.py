"""What this rank runs on: Python, libraries, the script's own files, the GPU, torch's switches.

It is looked at once, at `install()`, and compared between the ranks: a node that was set up anew
has another version of a library, or the script of yesterday.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from ddpprobe.rank.frames import is_of_a_package, is_of_python
from ddpprobe.records.environment import (
    CODE,
    GPU,
    NOTHING,
    SCALAR,
    Unlike,
    differences,
)
from ddpprobe.rundir.fuse import Fuse

MOST_FILES, MOST_BYTES = 256, 1 << 20  # of the script's own; and of each, what is read
MOST_TOLD = 64  # unlike environments that are told; those of other ranks are not known
MOST_DIFFERENCES = 16  # that are marked on the first sampled step
LONGEST = 80  # characters of a name, or a value
# What must be the same on all ranks: by another algorithm or protocol they wait for each other.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
logger = logging.getLogger("ddpprobe")


class _Loaded(NamedTuple):
    """What is loaded: versions of libraries, and the script's own files by their paths below it."""

    versions: dict[str, str]
    files: dict[str, Path]


@final
class OwnEnvironment:
    """What a rank runs on, as it is when somebody first asks.

    Args:
        rank: whose it is.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @cached_property
    def _is(self) -> dict[str, str]:
        return Fuse("environment").guard(look)() or {}

    @cached_property
    def digest(self) -> str:
        """The same as another rank's only if all is the same."""
        return _digest(json.dumps(self._is, sort_keys=True).encode())

    def meta(self, told_by: Mapping[str, int]) -> dict[str, Any]:
        """Return what a rank's journal says of it: itself, or of which rank it is the same.

        Args:
            told_by: digest -> the rank that tells what it stands for.
        """
        rank = told_by.get(self.digest)
        return {"environment": self._is if rank == self._rank else {}, "environment_of": rank}

    def unlike(self, numbers: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
        """Return the scalars of what ranks differ in; `numbers` as of `compare`."""
        return {
            f"{SCALAR}{name}": float(number[self.digest])
            for name, number in numbers.items()
            if self.digest in number
        }


def look() -> dict[str, str]:
    """Return what this process runs on, by name: a library as it is imported, `code/` and a path.

    Only what is loaded is known, so it costs no import: a few milliseconds.
    """
    loaded = _loaded(tuple(sys.modules.copy()), tuple(_roots()))
    found = {"python": platform.python_version(), **loaded.versions, **dict(_of_torch())}
    found |= {name: os.environ.get(name, NOTHING) for name in VARIABLES}
    found |= {f"{CODE}{name}": digest for name, digest in _digests(loaded.files)}
    return {_as_text(name): _as_text(value) for name, value in found.items()}


def tellers(digests: Sequence[str]) -> dict[str, int]:
    """Return of each digest the lowest rank that has it, which tells what it stands for."""
    found: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        if len(found) < MOST_TOLD:
            found.setdefault(digest, rank)
    return found


def compare(
    digests: Sequence[str], told: Sequence[Mapping[str, str]]
) -> tuple[list[Unlike], dict[str, dict[str, int]]]:
    """Return in what the ranks differ, and the first of it by name: digest -> number of its value.

    Args:
        digests: of the environments, in rank order.
        told: the environments of the tellers, in rank order; {} of the others.
    """
    by_digest = tellers(digests)
    like = {rank: by_digest[d] for rank, d in enumerate(digests) if d in by_digest}
    found = differences({rank: told[rank] for rank in by_digest.values()}, like)
    numbers: dict[str, dict[str, int]] = {}
    for name, ranks in found[:MOST_DIFFERENCES]:
        number = {value: i for i, value in enumerate(ranks)}
        values = {digest: told[rank].get(name) for digest, rank in by_digest.items()}
        numbers[name] = {d: number[value] for d, value in values.items() if value is not None}
    return found, numbers


def tell(found: Sequence[Unlike]) -> None:
    """Say in one line in what ranks differ, if they do."""
    if found:
        more = (
            f"; and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
        )
        logger.warning(
            "ddpprobe: ranks run on unlike software: %s%s",
            "; ".join(map(str, found[:MOST_DIFFERENCES])), more,
        )  # fmt: skip


def _of_torch() -> Iterator[tuple[str, str]]:
    yield "default dtype", str(torch.get_default_dtype())
    yield "deterministic algorithms", str(torch.are_deterministic_algorithms_enabled())
    yield "matmul precision", _matmul_precision()
    yield "cudnn.benchmark", str(torch.backends.cudnn.benchmark)
    yield "cudnn.deterministic", str(torch.backends.cudnn.deterministic)
    toolkit = torch.version.cuda or torch.version.hip
    if toolkit is None or not torch.cuda.is_initialized():
        return
    yield GPU, torch.cuda.get_device_name()
    yield "cuda", str(toolkit)
    yield "cudnn", str(torch.backends.cudnn.version())
    if torch.distributed.is_nccl_available():
        yield "nccl", ".".join(map(str, torch.cuda.nccl.version()))


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to say it where its old and its new switches were set
        return "set in two ways"


@lru_cache(1)
def _loaded(names: tuple[str, ...], roots: tuple[str, ...]) -> _Loaded:
    """Return what these modules say: found once, as a script installs a probe for each model."""
    versions, files = {}, {}
    for name in names:
        attributes = _attributes(sys.modules.get(name))
        version, file = (attributes.get(key) for key in ("__version__", "__file__"))
        is_a_library = "." not in name and name[:1] != "_" and name not in sys.stdlib_module_names
        if is_a_library and isinstance(version, str):
            versions[name] = version
        if isinstance(file, str) and file.endswith(".py"):
            root = next((root for root in roots if file.startswith(root)), None)
            if root is not None and not (is_of_python(file) or is_of_a_package(file)):
                files[file.removeprefix(root)] = file
    return _Loaded(versions, {name: Path(files[name]) for name in sorted(files)[:MOST_FILES]})


def _digests(files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield the names of files, and what they are now."""
    for name, file in files.items():
        try:
            of = file.stat()
            yield name, _digest_of_file(file, (of.st_mtime_ns, of.st_size, of.st_ino))
        except OSError:  # it is gone, or not to be read: nobody can compare it
            continue


@lru_cache(MOST_FILES)
def _digest_of_file(file: Path, _state: tuple[int, int, int]) -> str:
    """Return the digest of what a file begins with, read once for each state that it was in."""
    with file.open("rb") as source:
        return _digest(source.read(MOST_BYTES))


def _roots() -> list[str]:
    """Return the directories, each with a slash, whose files are the script's own."""
    script = _attributes(sys.modules.get("__main__")).get("__file__")
    try:
        directories = [Path.cwd()]
        if isinstance(script, str):  # Python imports from where a link to it leads
            directories = [Path(script).parent, Path(script).resolve().parent, *directories]
    except OSError:  # the directory was deleted
        return []
    others = {"/", os.environ.get("HOME")}  # of what runs there, everything would be its own
    return [f"{path}/" for path in directories if str(path) not in others]


def _attributes(module: object) -> Mapping[str, Any]:
    """Return a module's own attributes, without calling what a lazy one would load."""
    return getattr(module, "__dict__", None) or {}


def _as_text(text: str) -> str:
    """Return its end, without the half characters that a variable or a path may have."""
    return text.encode(errors="backslashreplace").decode()[-LONGEST:]


def _digest(of: bytes) -> str:
    return hashlib.blake2b(of, digest_size=6).hexdigest()
