"""TLS, passwords and headers of the daemon's HTTP server, in the file format of Prometheus.

The format is that of Prometheus's exporter-toolkit (docs/web-configuration.md there), which
node_exporter and Prometheus itself read. What of it this server cannot do is refused by name, and
so is what it does not know: a misspelt key must not leave a door open.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast, final

MAX_BYTES = 1 << 20  # of the file
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE, "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}  # fmt: skip
# Go's names of the ciphers of TLS 1.2 that keep no secret for longer than a connection, and
# OpenSSL's; those of TLS 1.3 cannot be chosen in either.
_CIPHERS = {
    f"TLS_ECDHE_{sign}_WITH_{name}": f"ECDHE-{sign}-{openssl}"
    for sign in ("ECDSA", "RSA")
    for name, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"), ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
}  # fmt: skip
_BCRYPT = re.compile(r"\$2[aby]\$\d\d\$[./A-Za-z0-9]{53}")
_HEADERS = {
    "Strict-Transport-Security", "X-Content-Type-Options", "X-Frame-Options", "X-XSS-Protection",
    "Content-Security-Policy",
}  # fmt: skip
_TOP = {"tls_server_config", "http_server_config", "basic_auth_users"}
_HTTP = {"headers", "http2"}
_TLS = {
    "cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version",
    "cipher_suites", "prefer_server_cipher_suites",
}  # fmt: skip
# A hash of no password, so that a name that is not known takes as long as one that is.
_NOBODY = b"$2b$10$abcdefghijklmnopqrstuuIDFRrQ0Mc0yVE7rAfT9v4X1VhBSuVW6"

_YES_OR_NO = {True: True, False: False}

K = TypeVar("K")
V = TypeVar("V")
logger = logging.getLogger("ddpprobe")


class WebConfigError(ValueError):
    """A web config that cannot be used; says where, what came, and what was expected."""


@final
@dataclass(frozen=True)
class WebConfig:
    """What one state of the file says.

    Attributes:
        cert_file, key_file: of the server, and of a node's daemon that pushes to the head.
        client_ca_file: whose signature a client's certificate must have, and the head's.
        users: bcrypt hashes of passwords by name; empty: nobody is asked.
        headers: added to every answer.
        context: of new connections to the server; None: plain HTTP.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None
    users: Mapping[str, bytes] = field(default_factory=dict)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    context: ssl.SSLContext | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files it names."""
        named = (self.cert_file, self.key_file, self.client_ca_file)
        return tuple(file for file in named if file is not None)

    def client_context(self) -> ssl.SSLContext:
        """Return what a node's daemon talks to the head with: the head must prove its address.

        Raises:
            OSError: a file cannot be read; ssl.SSLError is one.
        """
        context = ssl.create_default_context(cafile=self.client_ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert_file is not None and self.key_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context


class WebConfigFile:
    """The file, read again when it, or a file that it names, has changed.

    Args:
        path: of the file.

    Raises:
        WebConfigError: it cannot be used as it is now. A later state that cannot be used is told in
            the log, and the one before it holds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: object = None
        self._known: dict[bytes, None] = {}  # pairs that were right, not in the clear
        self._key = secrets.token_bytes(32)
        self._config = read(path)
        self._state = self._look()

    @property
    def now(self) -> WebConfig:
        """What holds for a new connection."""
        state = self._look()
        if state != self._state:
            self._state = state
            try:
                self._config = self._read_again()
                self._state = self._look()  # of the files that it names now
                self._known.clear()
                logger.info("ddpprobe: read %s again", self._path)
            except WebConfigError as error:
                logger.warning("ddpprobe: %s; what it said before holds", error)
        return self._config

    def _read_again(self) -> WebConfig:
        config = read(self._path)
        if (config.context is None) != (self._config.context is None):
            raise WebConfigError(f"{self._path}: TLS begins and ends with a daemon, not meanwhile")
        return config

    def admits(self, user: str, password: str) -> bool:
        """Return whether this is a user's password; takes some 50 ms the first time."""
        import bcrypt  # noqa: PLC0415  (only a file with users needs it)

        said = f"{user}\0{password}".encode()
        mark = hmac.digest(self._key, said, "sha256")
        if mark in self._known:
            return True
        stored = self._config.users.get(user)
        right = bcrypt.checkpw(password.encode()[:72], stored or _NOBODY) and stored is not None
        if right:
            self._known[mark] = None
        return right

    def _look(self) -> object:
        return [_identity(file) for file in (self._path, *self._config.files)]


class ReloadingContext(ssl.SSLContext):
    """Stands for the context that holds when a connection begins; asyncio asks for no more.

    Args:
        file: which has a context.
    """

    _file: WebConfigFile

    def __new__(cls, file: WebConfigFile) -> Self:
        """Make it; the protocol is not looked at, as no connection is its own."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._file = file
        return made

    def __init__(self, file: WebConfigFile) -> None:
        """Take the file, as `__new__` has."""

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, server_side: bool = False,  # noqa: FBT001, FBT002  (as the base class)
        server_hostname: str | bytes | None = None, session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:  # fmt: skip
        """Begin a connection."""
        context = cast("ssl.SSLContext", self._file.now.context)  # it had one, so it has one
        return context.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def read(path: Path) -> WebConfig:
    """Read the file and what it names.

    Raises:
        WebConfigError: see the class.
    """
    try:
        import yaml  # noqa: PLC0415  (only who has such a file needs it)
    except ImportError as error:
        raise WebConfigError(f"{path}: it takes pip install 'ddpprobe[web]' ({error})") from error
    try:
        with path.open("rb") as file:
            said = yaml.safe_load(file.read(MAX_BYTES))
    except (OSError, yaml.YAMLError) as error:
        raise WebConfigError(f"{path}: {error}") from error
    top = _section(
        path, said or {}, "", ("tls_server_config", "http_server_config", "basic_auth_users")
    )
    tls = _section(path, top.get("tls_server_config") or {}, "tls_server_config", _TLS)
    users = _users(path, top.get("basic_auth_users") or {})
    headers = _headers(path, top.get("http_server_config") or {})
    if not tls:
        return WebConfig(users=users, headers=headers)
    cert, key, authority = (
        _file(path, tls, n) for n in ("cert_file", "key_file", "client_ca_file")
    )
    context = _context(path, tls, cert, key, authority)
    return WebConfig(cert, key, authority, users, headers, context)


def _section(path: Path, said: object, name: str, known: Collection[str]) -> dict[str, Any]:
    where = f"{path}: {name or 'the file'}"
    if not isinstance(said, dict):
        raise WebConfigError(f"{where} is {said!r:.60}, expected {', '.join(sorted(known))}")
    for key in said:
        if key not in known:
            raise WebConfigError(
                f"{where} has {key!r}, which is not known here; known: {', '.join(sorted(known))}"
            )
    return said


def _file(path: Path, tls: Mapping[str, Any], name: str) -> Path | None:
    if tls.get(name) in {None, ""}:
        return None
    if not isinstance(tls[name], str):
        raise WebConfigError(
            f"{path}: {name} is {tls[name]!r:.60}, expected the path of a PEM file"
        )
    return path.parent / str(tls[name])  # as exporter-toolkit takes it: beside the config


def _context(
    path: Path, tls: Mapping[str, Any], cert: Path | None, key: Path | None, authority: Path | None
) -> ssl.SSLContext:
    if cert is None or key is None:
        raise WebConfigError(f"{path}: tls_server_config needs cert_file and key_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _choice(path, tls, "min_version", _VERSIONS, default="TLS12")
    context.maximum_version = _choice(path, tls, "max_version", _VERSIONS, default="TLS13")
    if context.minimum_version > context.maximum_version:
        raise WebConfigError(f"{path}: min_version is above max_version")
    if not _choice(path, tls, "prefer_server_cipher_suites", _YES_OR_NO, default=True):
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    asked = _choice(path, tls, "client_auth_type", _CLIENTS, default="NoClientCert")
    if asked == ssl.CERT_NONE and authority is not None:
        raise WebConfigError(
            f"{path}: client_ca_file without client_auth_type asks nobody for a certificate; "
            "write client_auth_type: RequireAndVerifyClientCert"
        )
    if asked != ssl.CERT_NONE and authority is None:
        raise WebConfigError(f"{path}: client_auth_type needs client_ca_file")
    names = tls.get("cipher_suites") or []
    for name in names if isinstance(names, list) else [names]:
        _choice(path, {"cipher_suites": name}, "cipher_suites", _CIPHERS, default="")
    try:
        if names:
            context.set_ciphers(":".join(_CIPHERS[name] for name in names))
        context.load_cert_chain(cert, key)
        if authority is not None:
            context.load_verify_locations(authority)
    except OSError as error:  # ssl.SSLError is one
        said = ", ".join(str(file) for file in (cert, key, authority) if file is not None)
        raise WebConfigError(f"{path}: {said}: {error}") from error
    context.verify_mode = asked
    return context


def _choice(
    path: Path, said: Mapping[str, Any], key: str, known: Mapping[K, V], *, default: K
) -> V:
    value = said.get(key, default)
    if isinstance(value, dict | list) or value not in known:
        raise WebConfigError(
            f"{path}: {key} is {value!r:.60}, expected one of {', '.join(map(str, known))}"
        )
    return known[value]


def _users(path: Path, said: object) -> dict[str, bytes]:
    if not isinstance(said, dict):
        raise WebConfigError(f"{path}: basic_auth_users is {said!r:.60}, expected NAME: HASH lines")
    if said:
        try:
            import bcrypt  # noqa: F401, PLC0415
        except ImportError as error:
            raise WebConfigError(f"{path}: passwords take pip install 'ddpprobe[web]'") from error
    for name, value in said.items():
        # Of a password in the clear nothing is shown.
        if (
            not isinstance(value, str)
            or not value.startswith(("$2a$", "$2b$", "$2y$"))
            or len(value) != 60
        ):
            raise WebConfigError(
                f"{path}: the password of {name!r} is no bcrypt hash; make one: htpasswd -nBC 10 ''"
            )
    return {str(name): value.encode() for name, value in said.items()}


def _headers(path: Path, said: object) -> tuple[tuple[bytes, bytes], ...]:
    section = _section(path, said, "http_server_config", _HTTP)
    if section.get("http2"):
        raise WebConfigError(f"{path}: http2 is not spoken here; write http2: false")
    headers = _section(path, section.get("headers") or {}, "headers", _HEADERS)
    for name, value in headers.items():
        if not isinstance(value, str) or not value.isprintable():
            raise WebConfigError(
                f"{path}: header {name} is {value!r:.60}, expected one line of text"
            )
    return tuple((name.lower().encode(), value.encode()) for name, value in headers.items())


def _identity(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
