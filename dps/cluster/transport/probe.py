"""What a process can share memory with others by, or why it cannot."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from dps.cluster.transport import memory


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs, as far as it matters to whom it can pass memory.

    Attributes
    ----------
    boot
        Of the system: the same for all containers on one machine, and for no other machine.
    user
        Its number.
    network
        Which network it sees; abstract unix sockets belong to one.
    refusal
        Why it cannot share memory; empty: it can.
    """

    boot: str
    user: int
    network: str
    refusal: str = ""

    def apart(self, other: Place) -> str:
        """Why these two processes cannot share memory; empty: they can."""
        if self.boot != other.boot:
            return "on another host"
        if self.user != other.user:
            return "of another user"
        if self.network != other.network:
            return "in another network namespace"
        if self.refusal or other.refusal:
            return f"no shared memory: {self.refusal or other.refusal}"
        return ""


def here() -> Place:
    """Where this process runs; tries out whether it can share memory."""
    if not sys.platform.startswith("linux"):
        return Place("", -1, "", f"{sys.platform} has no memfd")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError as error:
        return Place("", -1, "", str(error))
    return Place(boot, os.getuid(), network, _refusal())


def _refusal() -> str:
    try:
        memory.create(memory.SMALLEST)
        with socket.socket(socket.AF_UNIX):
            return ""
    except OSError as error:
        return str(error)
