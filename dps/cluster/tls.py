"""Owns the certificates by which the processes of a cluster know each other, and where they lie.

Whoever has the key of a cluster's certificate can do in it whatever Dask can: run any code. So keys
are in files that only the user can read, in a folder that goes with the cluster, however that ends.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import dask
from distributed.security import Security

from dps.errors import ConfigurationError

Role = Literal["scheduler", "worker"]

DASHBOARD = "distributed.scheduler.dashboard.tls"
ROLES = ("client", "scheduler", "worker")


def temporary() -> Security:
    """Make a certificate for one cluster, which is its own authority; nobody else has its key.

    Raises
    ------
    ConfigurationError
        What makes certificates is not installed.
    """
    try:
        return Security.temporary()
    except ImportError as error:
        raise ConfigurationError(
            "making certificates needs the package cryptography: pip install 'dps[tls]'; or name "
            "certificates of your own"
        ) from error


def from_files(ca_file: str, cert: str, key: str | None = None) -> Security:
    """Use a certificate of the user's own, for all processes of a cluster.

    Parameters
    ----------
    ca_file
        The certificates of the authority; whoever has one that it has signed is let in.
    cert, key
        The certificate, and its private key unless that is in the same file.

    Raises
    ------
    ConfigurationError
        One of the files cannot be read, or they do not go together; the message begins with the
        parameter that is wrong.
    """
    given = {"ca_file": ca_file, "cert": cert, **({"key": key} if key is not None else {})}
    paths = {name: os.path.abspath(path) for name, path in given.items()}
    for name, path in paths.items():
        # A device or a named pipe would be read for ever.
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            there = "cannot be read" if os.path.exists(path) else "there is no such file"
            raise ConfigurationError(f"{name}: {path}: {there}; expected a file in PEM format")
    by_role = {
        f"tls_{role}_{what}": paths[what]
        for role in ROLES
        for what in ("cert", "key")
        if what in paths
    }
    security = Security(require_encryption=True, tls_ca_file=paths["ca_file"], **by_role)
    try:
        security.get_listen_args("scheduler")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cert: {', '.join(paths.values())}: these are no authority, certificate and private "
            f"key in PEM format that go together: {error}"
        ) from error
    return security


def kept_in(folder: Path, security: Security) -> Security:
    """Write certificates that are in memory only to files of a folder, for this user alone.

    Dask would do so itself, in every process and each time that it needs them; one that is killed
    in that moment leaves the key behind.
    """
    moved = {}
    for name in security.__slots__:
        value = getattr(security, name)
        if name.startswith("tls_") and isinstance(value, str) and "\n" in value:
            value = _written(folder / f"{name}.pem", value)
        moved[name] = value
    return Security(**moved)


def dashboard_settings(security: Security, role: Role) -> Mapping[str, str]:
    """Dask's settings by which a process serves its pages and metrics with its certificate too.

    What the user's own configuration of Dask says of them goes first.
    """
    if not security.require_encryption or dask.config.get(f"{DASHBOARD}.cert") is not None:
        return {}
    files = security.get_tls_config_for_role(role)
    settings = {f"{DASHBOARD}.cert": files["cert"], f"{DASHBOARD}.key": files["key"]}
    return {name: value for name, value in settings.items() if value is not None}


def _written(path: Path, text: str) -> str:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return str(path)
