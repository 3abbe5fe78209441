"""How to ask a daemon that has a web config: the client's half, in the file format of Prometheus.

The format is that of Prometheus's HTTP clients (`promtool --http.config.file`), of which
`basic_auth` and `tls_config` are taken. What is not known here is refused by name.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddpprobe.errors import RunError
from ddpprobe.reader.live.live_from_metrics import fetch

MAX_BYTES = 1 << 20  # of the file, and of the password's
_TOP = ("basic_auth", "tls_config")
_BASIC = ("username", "password_file")
_FILES = ("ca_file", "cert_file", "key_file")
_TLS = (*_FILES, "server_name")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """What the file says, its paths absolute.

    Attributes:
        basic_auth: username and password_file, or nothing.
        tls_config: ca_file, cert_file, key_file, server_name, as far as they are said.
    """

    basic_auth: Mapping[str, str]
    tls_config: Mapping[str, str]

    def scrape_config(self) -> dict[str, Mapping[str, str]]:
        """Return the keys of a scrape_config of Prometheus that say the same."""
        said = {"basic_auth": self.basic_auth, "tls_config": self.tls_config}
        return {name: values for name, values in said.items() if values}

    def fetch(self) -> Callable[[str], tuple[bytes, str]]:
        """Return how a URL is asked.

        Raises:
            RunError: a file that is named cannot be used, or only Prometheus can do it.
        """
        tls = self.tls_config
        if "server_name" in tls:
            raise RunError("server_name is for Prometheus: give a URL with that name in it")
        try:
            context = ssl.create_default_context(cafile=tls.get("ca_file"))
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if "cert_file" in tls:
                context.load_cert_chain(tls["cert_file"], tls["key_file"])
            authorization = self._authorization()
        except OSError as error:  # ssl.SSLError is one
            raise RunError(f"{', '.join(self._files())}: {error}") from error
        return partial(fetch, authorization=authorization, context=context)

    def _authorization(self) -> str:
        if not self.basic_auth:
            return ""
        with Path(self.basic_auth["password_file"]).open("rb") as file:
            password = file.read(MAX_BYTES).strip()
        pair = self.basic_auth["username"].encode() + b":" + password
        return f"Basic {base64.b64encode(pair).decode()}"

    def _files(self) -> list[str]:
        named = {**self.basic_auth, **self.tls_config}
        return [named[name] for name in (*_FILES, "password_file") if name in named]


def read(path: Path) -> HttpConfig:
    """Read the file.

    Raises:
        RunError: it cannot be read, or says what is not known here.
    """
    try:
        import yaml  # noqa: PLC0415  (only who has such a file needs it)
    except ImportError as error:
        raise RunError(f"{path}: it takes pip install 'ddpprobe[web]' ({error})") from error
    try:
        with path.open("rb") as file:
            said = yaml.safe_load(file.read(MAX_BYTES))
    except OSError as error:
        advice = f"give a file that says {' or '.join(_TOP)}"
        raise RunError(f"--http-config {path}: {error.strerror}; {advice}") from error
    except yaml.YAMLError as error:
        raise RunError(f"{path}: {error}") from error
    top = _section(path, said or {}, "the file", _TOP)
    basic = _texts(path, top.get("basic_auth") or {}, "basic_auth", _BASIC)
    tls = _texts(path, top.get("tls_config") or {}, "tls_config", _TLS)
    if len(basic) == 1:
        raise RunError(f"{path}: basic_auth needs username and password_file")
    if ("cert_file" in tls) != ("key_file" in tls):
        raise RunError(f"{path}: cert_file and key_file go together")
    return HttpConfig(basic, tls)


def _section(path: Path, said: object, name: str, known: Collection[str]) -> dict[str, Any]:
    expected = ", ".join(known)
    if not isinstance(said, dict):
        raise RunError(f"{path}: {name} is no mapping, expected {expected}")
    for key in said:
        if key == "password":  # it would stand in prometheus.yml, which others may read
            raise RunError(f"{path}: write password_file, the path of a file, and no password")
        if key not in known:
            raise RunError(f"{path}: {name} has {key!r}, which is not known here: {expected}")
    return said


def _texts(path: Path, said: object, name: str, known: Collection[str]) -> dict[str, str]:
    found = _section(path, said, name, known)
    for key, value in found.items():
        if not isinstance(value, str) or not value:
            raise RunError(f"{path}: {key} is {value!r:.60}, expected text")
    home = path.absolute().parent  # as Prometheus takes them: beside the config
    return {k: str(home / v) if k.endswith("_file") else v for k, v in found.items()}
