"""The certificates by which the processes of a cluster authenticate each other, and their files.

The key of a cluster's certificate permits running any code in the cluster. So keys are in files
that only the user can read, in a folder that is removed with the cluster, however it ends.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import dask
from distributed import Scheduler, Worker
from distributed.security import Security

DASHBOARD = "distributed.scheduler.dashboard.tls"
LOOPBACK = "127.0.0.1"
VALID = timedelta(days=365)
CLOCKS_DIFFER = timedelta(days=1)  # between the machines of a cluster, at most


def temporary() -> Security:
    """Create a certificate for one cluster, which is its own authority."""
    # On an elliptic curve that takes less than a millisecond, so every cluster can have its own.
    # `Security.temporary` takes 55 ms; its certificates are invalid on a host whose clock is slow.
    from cryptography import x509  # the import takes longer than creating certificates
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dps")])
    now = datetime.now(UTC)
    loopback = [x509.DNSName("localhost"), x509.IPAddress(ip_address(LOOPBACK))]
    # For digital signatures, also of certificates.
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName(loopback), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    cert = certificate.public_bytes(pem).decode()
    return for_all(cert, cert, key.private_bytes(pem, *form).decode())


def for_all(ca_file: str, cert: str, key: str | None) -> Security:
    """Return a certificate that clients, scheduler and workers share."""
    roles = ("client", "scheduler", "worker")
    given = {"cert": cert} if key is None else {"cert": cert, "key": key}
    files = {f"tls_{role}_{what}": given[what] for role in roles for what in given}
    return Security(require_encryption=True, tls_ca_file=ca_file, **files)


def kept_in(folder: Path, security: Security) -> Security:
    """Write certificates that are only in memory to files that only this user can read."""
    # Otherwise Dask writes them in every process each time that it needs them, and a process that
    # is killed at that moment leaves the key behind.
    kept = copy(security)
    for name in security.__slots__:
        value = getattr(security, name)
        if name.startswith("tls_") and isinstance(value, str) and "\n" in value:
            path = folder / f"{name}.pem"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(value)
            setattr(kept, name, str(path))
    return kept


def remove_keys(folder: Path) -> None:
    """Remove the files of `kept_in`, and the folder if it is then empty."""
    # The folder is not listed: a process without free file descriptors could not do that.
    for name in Security.__slots__:
        (folder / f"{name}.pem").unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def dashboard_settings(security: Security, role: str) -> Mapping[str, str]:
    """Return Dask's settings to serve pages and metrics with the certificate of a process."""
    # The user's own configuration of Dask takes precedence.
    if not security.require_encryption or dask.config.get(f"{DASHBOARD}.cert") is not None:
        return {}
    files = security.get_tls_config_for_role(role)
    settings = {f"{DASHBOARD}.cert": files["cert"], f"{DASHBOARD}.key": files["key"]}
    return {name: value for name, value in settings.items() if value is not None}


class PagesForMembers:
    """Mix-in of a Dask server: clients need a certificate for pages and metrics too."""

    security: Security
    http_server: Any

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Start to listen; no connection is accepted before this returns."""
        super().start_http_server(*args, **kwargs)  # type: ignore[misc]
        if self.security.require_encryption:  # which is all that Dask itself does
            own = dask.config.get(f"{DASHBOARD}.ca-file", None)
            context: ssl.SSLContext = self.http_server.ssl_options
            context.load_verify_locations(own or self.security.tls_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED


class SchedulerOfMembers(PagesForMembers, Scheduler):
    """A Dask scheduler whose pages need a certificate."""


class WorkerOfMembers(PagesForMembers, Worker):
    """A Dask worker whose metrics need a certificate."""
