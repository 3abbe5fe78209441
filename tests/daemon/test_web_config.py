"""TLS, certificates of clients and passwords at /metrics and at the gather's door."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import shutil
import ssl
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml

from ddpprobe.cli.main import main
from ddpprobe.daemon import push
from ddpprobe.daemon.push import Pusher
from ddpprobe.daemon.server import Server
from ddpprobe.daemon.variables import parse_address
from ddpprobe.daemon.web_config import WebConfigError, WebConfigFile, read
from ddpprobe.rundir.roster import Shared
from ddpprobe.rundir.targets import TargetFile

from ..made_runs import record
from ..prometheus_harness import Prometheus, until
from ..waiting import PATIENCE
from .made_certificates import Authority

PAGE = b"# TYPE a gauge\na 1\n"
HASH = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
USER = {"basic_auth_users": {"scraper": HASH}}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.sign("server")
    made.sign("client")
    return made


def written(folder: Path, said: dict[str, Any], **tls: object) -> Path:
    """Write a web config: with certificates if anything is said of TLS."""
    path = folder / "web.yml"
    own = {"cert_file": "server.crt", "key_file": "server.key"}
    path.write_text(yaml.safe_dump(said | ({"tls_server_config": own | tls} if tls else {})))
    return path


REFUSED = (http.client.HTTPException, OSError)
TLS = {"min_version": "TLS12"}
MUTUAL = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "authority.crt"}


@contextlib.contextmanager
def serving(path: Path) -> Iterator[tuple[Server, str]]:
    server = Server("127.0.0.1:0", "127.0.0.1:0", WebConfigFile(path))
    address = server.start()
    server.publish(PAGE, PAGE + b"# EOF\n")
    try:
        yield server, address
    finally:
        server.stop()


def context(authority: Authority | None, client: Path | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=authority.file if authority else None)
    if client is not None:
        made.load_cert_chain(client, client.with_suffix(".key"))
    return made


def ask(
    address: str, tls: ssl.SSLContext | None, path: str = "/metrics", password: str = ""
) -> tuple[int, bytes, http.client.HTTPMessage]:
    host, port = parse_address(address)
    kind: Any = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    connection = kind(host, port, timeout=10 * PATIENCE, **({"context": tls} if tls else {}))
    token = base64.b64encode(f"scraper:{password}".encode()).decode()
    with contextlib.closing(connection):
        connection.request(
            "GET", path, headers={"Authorization": f"Basic {token}"} if password else {}
        )
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


def test_a_client_that_trusts_the_certificate_reads_and_no_other(
    tmp_path, authority, caplog
) -> None:
    stranger = Authority(tmp_path, "stranger")
    caplog.set_level("INFO", "ddpprobe.http")
    with serving(written(tmp_path, {}, **TLS)) as (server, address):
        served = [said for said in caplog.messages if said.startswith("serving")]
        assert served == [f"serving https://{one}" for one in (address, server.gather_address)]
        assert server.scheme == "https"
        assert ask(address, context(authority))[:2] == (200, PAGE)
        for wrong in (context(stranger), context(None)):
            with pytest.raises(ssl.SSLCertVerificationError):
                ask(address, wrong)
        with pytest.raises(REFUSED):
            ask(address, None)  # in the clear
        assert ask(address, context(authority))[0] == 200
        _, targets, _ = ask(address, context(authority), "/sd")
        assert json.loads(targets)[0]["labels"] == {"__scheme__": "https"}
    assert "http://" not in caplog.text


def test_a_protocol_before_tls_1_2_is_not_spoken(tmp_path, authority) -> None:
    for said, ours, speaks in (
        ({"min_version": "TLS12"}, ssl.TLSVersion.TLSv1_1, False),
        ({"min_version": "TLS13"}, ssl.TLSVersion.TLSv1_2, False),
        ({"max_version": "TLS12"}, ssl.TLSVersion.TLSv1_2, True),
    ):
        old = context(authority)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the old version, by Python
            old.minimum_version = old.maximum_version = ours
        with serving(written(tmp_path, {}, **said)) as (_, address):
            if speaks:
                assert ask(address, old)[0] == 200
            else:
                with pytest.raises(REFUSED):
                    ask(address, old)


def test_only_who_has_a_certificate_of_the_authority_reads(tmp_path, authority) -> None:
    stranger = Authority(tmp_path, "stranger")
    theirs = stranger.sign("theirs")
    expired = authority.sign("expired", days=-1)
    with serving(written(tmp_path, {}, **MUTUAL)) as (_, address):
        assert ask(address, context(authority, tmp_path / "client.crt"))[0] == 200
        for client in (None, theirs, expired):
            with pytest.raises(REFUSED):
                ask(address, context(authority, client))


def test_a_password_is_asked_for_but_by_the_gather_which_has_tokens(tmp_path, authority) -> None:
    with serving(written(tmp_path, USER, **TLS)) as (server, address):
        server.set_gather_handler(lambda *_: b"", Shared("token"))
        tls = context(authority)
        for path in ("/metrics", "/sd", "/", "/healthz", "/nothing"):
            status, _, headers = ask(address, tls, path)
            assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="ddpprobe"')
        assert ask(address, tls, password="wrong")[0] == 401
        assert [ask(address, tls, password="right")[0] for _ in range(2)] == [200, 200]
        pusher = Pusher(f"https://{server.gather_address}", lambda: "token", "n", server._web)
        pusher.close(1.0)


def test_headers_of_the_file_are_on_every_answer(tmp_path, authority) -> None:
    said = {"http_server_config": {"headers": {"X-Frame-Options": "deny"}, "http2": False}}
    with serving(written(tmp_path, said)) as (server, address):
        assert server.scheme == "http"
        for path in ("/metrics", "/nothing"):
            headers = ask(address, None, path)[2]
            assert (headers["X-Frame-Options"], headers["X-Content-Type-Options"]) == (
                "deny",
                "nosniff",
            )


def test_files_that_change_hold_from_the_next_connection_on(tmp_path, authority, caplog) -> None:
    path = written(tmp_path, USER, **TLS)
    other = Authority(tmp_path, "other")
    caplog.set_level(logging.INFO, "ddpprobe")
    with serving(path) as (_, address):
        assert ask(address, context(authority), password="right")[0] == 200
        other.sign("server")  # another certificate at the same place
        assert ask(address, context(other), password="right")[0] == 200
        path.write_text(path.read_text() + "nothing_known: 1\n")
        assert ask(address, context(other), password="right")[0] == 200
        assert caplog.text.count("what it said before holds") == 1
        changed = bcrypt.hashpw(b"changed", bcrypt.gensalt(4)).decode()
        written(tmp_path, {"basic_auth_users": {"scraper": changed}}, **TLS)
        assert ask(address, context(other), password="right")[0] == 401
        assert ask(address, context(other), password="changed")[0] == 200
        written(tmp_path, USER)  # without TLS: not in the clear unasked
        assert ask(address, context(other), password="changed")[0] == 200
        assert "TLS begins and ends with a daemon" in caplog.text


CERTIFICATE = {"cert_file": "server.crt", "key_file": "server.key"}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("[1]", "the file is [1], expected basic_auth_users, "),
        ("{", "web.yml: while parsing"),
        ("tls_server_confg: {}", "'tls_server_confg', which is not known here; known: basic_auth_"),
        ("rate_limit: {}", "'rate_limit', which is not known here"),
        ({"tls_server_config": {"cert_file": "server.crt"}}, "needs cert_file and key_file"),
        ({"tls_server_config": {**CERTIFICATE, "min_version": "TLS11"}},
         "min_version is 'TLS11', expected one of TLS12, TLS13"),
        ({"tls_server_config": {**CERTIFICATE, "min_version": "TLS13", "max_version": "TLS12"}},
         "min_version is above max_version"),
        ({"tls_server_config": {**CERTIFICATE, "client_auth_type": "RequireAnyClientCert"}},
         "expected one of NoClientCert, VerifyClientCertIfGiven, RequireAndVerifyClientCert"),
        ({"tls_server_config": {**CERTIFICATE, "client_ca_file": "authority.crt"}},
         "asks nobody for a certificate"),
        ({"tls_server_config": {**CERTIFICATE, "client_auth_type": "RequireAndVerifyClientCert"}},
         "client_auth_type needs client_ca_file"),
        ({"tls_server_config": {**CERTIFICATE, "key_file": "client.key"}}, "KEY_VALUES_MISMATCH"),
        ({"tls_server_config": {**CERTIFICATE, "cert_file": "none.crt"}}, "No such file"),
        ({"tls_server_config": {**CERTIFICATE, "cert_file": 3}}, "cert_file is 3, expected"),
        ({"tls_server_config": {**CERTIFICATE, "cipher_suites": ["TLS_RSA_WITH_RC4_128_SHA"]}},
         "cipher_suites is 'TLS_RSA_WITH_RC4_128_SHA', expected one of TLS_ECDHE_"),
        ({"tls_server_config": {**CERTIFICATE, "curve_preferences": ["X25519"]}}, "not known here"),
        ({"basic_auth_users": {"a": "secret word"}}, "of 'a' is no bcrypt hash; make one: "),
        ({"basic_auth_users": ["a"]}, "expected NAME: HASH lines"),
        ({"http_server_config": {"http2": True}}, "http2 is not spoken here; write http2: false"),
        ({"http_server_config": {"headers": {"Set-Cookie": "a"}}}, "headers has 'Set-Cookie'"),
        ({"http_server_config": {"headers": {"X-Frame-Options": "a\nb"}}}, "expected one line"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_file_is_said_with_what_was_expected(
    tmp_path, authority, said, error
) -> None:
    path = tmp_path / "web.yml"
    path.write_text(said if isinstance(said, str) else yaml.safe_dump(said))
    with pytest.raises(WebConfigError) as raised:
        read(path)
    assert error in str(raised.value)
    assert "secret word" not in str(raised.value)


def test_a_cipher_that_is_asked_for_is_the_one_spoken(tmp_path, authority) -> None:
    name = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"
    path = written(tmp_path, {}, max_version="TLS12", cipher_suites=[name])
    found = read(path).context
    assert found is not None
    spoken = [c["name"] for c in found.get_ciphers() if c["protocol"] == "TLSv1.2"]
    assert spoken == ["ECDHE-ECDSA-CHACHA20-POLY1305"]


def test_a_real_prometheus_scrapes_with_its_tls_config_and_basic_auth(tmp_path, authority) -> None:
    path = written(tmp_path, USER, **MUTUAL)
    with serving(path) as (_, address), contextlib.ExitStack() as stack:
        folder = tmp_path / "prometheus"
        folder.mkdir()
        right = {
            "scheme": "https", "basic_auth": {"username": "scraper", "password": "right"},
            "tls_config": {
                "ca_file": str(authority.file), "cert_file": str(tmp_path / "client.crt"),
                "key_file": str(tmp_path / "client.key"),
            },
        }  # fmt: skip
        wrong = right | {"basic_auth": {"username": "scraper", "password": "wrong"}}
        made = Prometheus(
            folder, more={"right": right, "wrong": wrong}, right=address, wrong=address
        )
        stack.callback(made.close)
        assert until(made.ready)
        assert until(
            lambda: {labels["job"]: v for labels, v in made.now("up")} == {"right": 1, "wrong": 0}
        )
        assert made.now('a{job="right"}')[0][1] == 1


def client_half(folder: Path, **said: dict[str, str]) -> Path:
    """Write what `--http-config` takes, beside the certificates."""
    (folder / "password").write_text("right\n")
    path = folder / "http.yml"
    basic = {"username": "scraper", "password_file": "password"}
    tls = {"ca_file": "authority.crt", "cert_file": "client.crt", "key_file": "client.key"}
    path.write_text(yaml.safe_dump({"basic_auth": basic, "tls_config": tls} | said))
    return path


def test_what_up_writes_lets_a_real_prometheus_in(tmp_path, authority, monkeypatch, capfd) -> None:
    monkeypatch.setenv("DDPPROBE_SD_DIR", str(tmp_path / "announced"))
    with serving(written(tmp_path, USER, **MUTUAL)) as (_, address), contextlib.ExitStack() as ends:
        TargetFile(tmp_path / "announced", "run", "node_0000", address, "https").keep(0.0)
        half = client_half(tmp_path)
        monkeypatch.chdir(tmp_path)
        words = ["up", "stack", "--no-start"]
        assert main([*words, "--http-config", "http.yml", "--target", "a:1"]) == 0
        assert main(words) == 0  # it is remembered
        stack = tmp_path / "stack"
        (job,) = yaml.safe_load((stack / "prometheus.yml").read_text())["scrape_configs"]
        assert job["basic_auth"] == {
            "username": "scraper", "password_file": str(tmp_path / "password"),
        }  # fmt: skip
        named = yaml.safe_load((stack / "targets/ddpprobe.json").read_text())
        assert named == [{"targets": ["a:1"], "labels": {"__scheme__": "https"}}]
        folder = tmp_path / "prometheus"
        folder.mkdir()
        more = {"up": {n: job[n] for n in ("basic_auth", "tls_config", "file_sd_configs")}}
        made = Prometheus(folder, more=more, up={})
        ends.callback(made.close)
        assert until(made.ready)
        assert until(lambda: {"run": "run", "job": "up"}.items() <= answering(made).items())
        # Without it there is no trace of it.
        assert main([*words, "--http-config", "", "--target", "a:1"]) == 0
        assert "basic_auth" not in (stack / "prometheus.yml").read_text()
        half.unlink()
        assert main([*words, "--http-config", "http.yml"]) == 2
        assert "http.yml" in capfd.readouterr().err


def answering(prometheus: Prometheus) -> dict[str, str]:
    return next((dict(labels) for labels, value in prometheus.now("up") if value == 1), {})


def test_top_shows_a_daemon_that_asks_for_a_certificate_and_a_password(
    tmp_path, authority, capsys
) -> None:
    with serving(written(tmp_path, USER, **MUTUAL)) as (server, address):
        view = b"# TYPE ddpprobe_build_info gauge\nddpprobe_build_info 1\n"
        server.publish(view, view + b"# EOF\n")
        words = ["top", f"https://{address}", "--once"]
        file = ["--http-config", str(client_half(tmp_path))]
        assert main([*words, *file]) == 0
        assert address in capsys.readouterr().out
        for wrong in (words, ["top", f"http://{address}", "--once"]):
            assert main(wrong) == 2
            assert "type https://HOST:PORT --http-config FILE" in capsys.readouterr().err
        (tmp_path / "password").write_text("wrong")
        assert main([*words, *file]) == 2
        assert "answers 401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"bearer_token": "a"}, "'bearer_token', which is not known here: basic_auth, tls_config"),
        (
            {"basic_auth": {"username": "a", "password": "in the clear"}},
            "write password_file, the path",
        ),
        ({"basic_auth": {"username": "a"}}, "needs username and password_file"),
        ({"tls_config": {"cert_file": "client.crt"}}, "cert_file and key_file go together"),
        ({"tls_config": {"insecure_skip_verify": True}}, "'insecure_skip_verify', which is not"),
        ({"tls_config": {"ca_file": 3}}, "ca_file is 3, expected text"),
        ({"tls_config": {"ca_file": "none.crt"}}, "none.crt: [Errno 2] No such file"),
        ({"tls_config": {"server_name": "a"}}, "give a URL with that name in it"),
        ({"tls_config": ["a"]}, "tls_config is no mapping, expected ca_file"),
    ],
)
def test_what_is_wrong_with_the_clients_half_is_said(tmp_path, capsys, said, error) -> None:
    path = tmp_path / "http.yml"
    path.write_text(yaml.safe_dump(said))
    assert main(["top", "https://127.0.0.1:1", "--http-config", str(path)]) == 2
    err = capsys.readouterr().err
    assert error in err
    assert "in the clear" not in err


def test_curl_with_the_authority_reads_and_without_it_does_not(tmp_path, authority) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    with serving(written(tmp_path, USER, **TLS)) as (_, address):
        words = ["curl", "-s", "-u", "scraper:right", f"https://{address}/metrics"]
        trusts = [*words, "--cacert", str(authority.file)]
        assert subprocess.run(trusts, capture_output=True, check=True).stdout == PAGE
        assert subprocess.run(words, capture_output=True, check=False).returncode == 60


def pushed(server: Server, folder: Path, **said: Any) -> Pusher:
    (folder / "node").mkdir(exist_ok=True)
    path = folder / "node" / "web.yml"
    tls = {name: str(folder / value) if "file" in name else value for name, value in said.items()}
    path.write_text(yaml.safe_dump({"tls_server_config": tls} if tls else {}))
    web = WebConfigFile(path)
    pusher = Pusher(f"https://{server.gather_address}", lambda: "token", "node_0001", web)
    pusher.push(record(0, 0))
    return pusher


def test_a_node_gathers_over_mutual_tls_and_one_without_a_certificate_does_not(
    tmp_path, authority, poll, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(push, "KEPT_OUT_SECONDS", 0.0)
    came: list[str] = []
    with serving(written(tmp_path, {}, **MUTUAL)) as (server, _):
        server.set_gather_handler(lambda node, _: came.append(node) or b"", Shared("token"))
        node = MUTUAL | {"cert_file": "client.crt", "key_file": "client.key"}
        own = pushed(server, tmp_path, **node)
        poll(lambda: own.acknowledged == (0, 0))
        assert own.not_let_in == ""
        own.close(5.0)
        stranger = Authority(tmp_path, "stranger")
        stranger.sign("theirs")
        for said in (
            {},  # it trusts the machine's authorities, which have not signed the head's
            node | {"cert_file": "theirs.crt", "key_file": "theirs.key"},
            node | {"client_ca_file": "stranger.crt"},
        ):
            caplog.clear()
            other = pushed(server, tmp_path, **said)
            poll(lambda: "does not answer" in caplog.text)
            assert "lacks this node" in other.not_let_in
            assert other.acknowledged == (-1, -1)
            other.close(0.0)
    assert set(came) == {"node_0001"}


def test_a_head_with_a_certificate_of_another_address_is_not_trusted(
    tmp_path, authority, poll, caplog
) -> None:
    authority.sign("server", address="127.0.0.9")
    with serving(written(tmp_path, {}, **MUTUAL)) as (server, _):
        own = pushed(
            server, tmp_path, **MUTUAL | {"cert_file": "client.crt", "key_file": "client.key"}
        )
        poll(lambda: "does not answer" in caplog.text)
        assert "IP address mismatch" in caplog.text
        own.close(0.0)


@pytest.mark.parametrize(
    ("said", "open_"),
    [
        (None, "in the clear and without a password"), (USER, "in the clear"),
        ({"tls_server_config": CERTIFICATE}, "without a password"),
        ({"tls_server_config": CERTIFICATE | MUTUAL}, None),
        ({"tls_server_config": CERTIFICATE, **USER}, None),
    ],
)  # fmt: skip
def test_what_keeps_nobody_out_of_metrics_for_all_is_said_once(
    tmp_path, authority, caplog, said, open_
) -> None:
    path = tmp_path / "web.yml"
    path.write_text(yaml.safe_dump(said or {}))
    server = Server("0.0.0.0:0", None, WebConfigFile(path) if said else None)
    server.start()
    server.stop()
    assert caplog.text.count("to whoever reaches that port") == (open_ is not None)
    assert bool(server.warning) == (open_ is not None)
    assert open_ is None or f"that port, {open_};" in caplog.text


def test_prometheus_is_told_to_scrape_over_tls(tmp_path) -> None:
    file = TargetFile(tmp_path, "run", "node_0000", "10.0.0.1:9", "https")
    file.keep(0.0)
    assert json.loads(file.path.read_text())[0]["labels"] == {
        "run": "run", "__param_run": "run", "__scheme__": "https",
    }  # fmt: skip
