"""Owns where processes of a cluster run, by their own account, and whether signals reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import distributed

from dps.errors import ConfigurationError

ANSWER_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Process:
    """Where a process runs: `host` as people call it, `machine` as it is known for sure.

    `here` tells whether signals of this process reach it.
    """

    pid: int
    host: str
    machine: str
    here: bool


async def look_at(client: distributed.Client, addresses: Sequence[str]) -> dict[str, Process]:
    """Find out where Dask workers run; those that are lost meanwhile are left out.

    Raises
    ------
    ConfigurationError
        dps is not installed there, or another version is.
    TimeoutError
        Some do not answer.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        answers = await client.run(_what_runs_there(), workers=list(addresses), on_error="return")
    return {
        address: _process(answer, f"Dask worker at {address}")
        for address, answer in answers.items()
        if not isinstance(answer, OSError)
    }


def check_scheduler(client: distributed.Client) -> None:
    """Refuse a scheduler that cannot run the coordinator; raises `ConfigurationError`."""
    try:
        answer: Any = client.run_on_scheduler(_what_runs_there())
    except Exception as error:  # noqa: BLE001 - whatever was raised there is told
        answer = error
    _process(answer, f"Dask scheduler at {client.scheduler.address}")


def _process(answer: Any, where: str) -> Process:
    """What a process has said about itself; raises `ConfigurationError` if dps cannot use it."""
    advice = "install the same version of dps and of its requirements there as here"
    if isinstance(answer, Exception):
        raise ConfigurationError(f"dps cannot run on the {where}: {answer!r}; {advice}")
    version, pid, uid, host, boot, namespace = answer
    ours, _, our_uid, _, our_boot, our_namespace = _what_runs_there()()
    if version != ours:
        raise ConfigurationError(f"the {where} has dps {version}, and here is {ours}; {advice}")
    here = (boot, namespace) == (our_boot, our_namespace) and our_uid in (0, uid)
    return Process(pid, host, boot or host, here)


def _what_runs_there() -> Callable[[], tuple[str, int, int, str, str, str]]:
    """A function that tells which dps there is in a process, and on which machine it runs.

    It goes there as a whole, for a function of a module that is missing there could not say so.
    """

    def tell() -> tuple[str, int, int, str, str, str]:
        import importlib
        import os
        import socket
        from pathlib import Path

        version = importlib.import_module("dps").__version__
        boot = Path("/proc/sys/kernel/random/boot_id")
        return (
            version,
            os.getpid(),
            os.geteuid(),
            socket.gethostname(),
            boot.read_text().strip() if boot.exists() else "",
            os.readlink("/proc/self/ns/pid") if boot.exists() else socket.gethostname(),
        )

    return tell
