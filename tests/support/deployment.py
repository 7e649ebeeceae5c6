"""A Dask deployment as users have them: `dask scheduler` and `dask worker`, on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distributed import Client, Security

from tests.support.training import SECONDS
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def can_have_own_pids() -> bool:
    """Whether processes can be started here that signals from here do not reach by their pids."""
    try:
        return subprocess.run([*OWN_PIDS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def workers(number: int, *options: str) -> tuple[str, ...]:
    """The options of `dask worker` for so many of them, each with a nanny and one thread."""
    return ("--nworkers", str(number), "--nthreads", "1", *options)


@contextmanager
def deployed(
    folder: Path,
    *groups: Sequence[str],
    before: Sequence[str] = (),
    certificate: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Yield the address of a Dask scheduler that has `dask worker`s with these options (`workers`).

    All have joined by then. `before` is put before the command of the workers. With a `certificate`
    (see `tls.files_of`) they talk over TLS.
    """
    file = folder / "scheduler.json"
    common = ["--host", "127.0.0.1", "--no-dashboard"]
    for what, path in (certificate or {}).items():
        common += [f"--tls-{what.replace('_', '-')}", path]
    with ExitStack() as stack:
        _start(stack, folder, "dask_scheduler", "--port", "0", "--scheduler-file", file, *common)
        eventually(file.exists, SECONDS)
        address = str(eventually(lambda: _address(file), SECONDS))
        for group in groups:
            own = "--memory-limit", "0", "--local-directory", folder
            _start(stack, folder, "dask_worker", address, *common, *own, *group, before=before)
        number = sum(int(count) for _, count, *_ in groups)
        with Client(address, security=_security(certificate), set_as_default=False) as client:
            client.wait_for_workers(number, timeout=SECONDS)
        yield address


def _security(certificate: Mapping[str, str] | None) -> Security | None:
    if certificate is None:
        return None
    return Security(
        require_encryption=True,
        tls_ca_file=certificate["ca_file"],
        tls_client_cert=certificate["cert"],
        tls_client_key=certificate["key"],
    )


def _address(file: Path) -> str | None:
    try:
        address: str = json.loads(file.read_text())["address"]
    except ValueError:  # it is being written
        return None
    return address


def _start(
    stack: ExitStack, folder: Path, module: str, *arguments: object, before: Sequence[str] = ()
) -> None:
    log = stack.enter_context((folder / f"{module}.log").open("a"))
    process = subprocess.Popen(
        [*before, sys.executable, "-m", f"distributed.cli.{module}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
    )
    stack.callback(process.wait)
    # `unshare` does not pass SIGTERM on; when it is killed, so is all that it has started.
    stack.callback(process.kill if before else process.terminate)
