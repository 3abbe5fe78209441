"""A certificate authority of a test, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """Signs certificates of an address (by default 127.0.0.1) and localhost, valid by now.

    Args:
        folder: for its files.
        name: of the authority.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(self._name, self._name, self._key, days=1).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self._own = made.sign(self._key, hashes.SHA256())
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(self._own.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, days: float = 1.0, address: str = "127.0.0.1") -> Path:
        """Write `name`.crt and `name`.key; return the first. Negative days: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
        made = (
            _builder(_name(name), self._name, key, days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        found = made.sign(self._key, hashes.SHA256())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )  # fmt: skip
        (self._folder / f"{name}.key").write_bytes(pem)
        file = self._folder / f"{name}.crt"
        file.write_bytes(found.public_bytes(serialization.Encoding.PEM))
        return file


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    begin = NOW - datetime.timedelta(days=2)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(NOW + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
