"""A real `mlflow server` on a store of its own, for tests of what becomes of it and after it."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from tests.support.waiting import eventually

HOST = "127.0.0.1"
START_SECONDS = 90.0


class MlflowServer:
    """Serves `folder`; can be killed, paused and started again. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.database, self.artifacts = folder / "mlflow.db", folder / "artifacts"
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = int(probe.getsockname()[1])
        self.uri = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "server.log"

    def __enter__(self) -> MlflowServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, on the same store as before, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", HOST]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self.artifacts)]
        # Its consumers of jobs are seven processes, which nobody here has a use for.
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment = {**os.environ, **quiet}
        environment.pop("MLFLOW_TRACKING_URI", None)  # a test's, which is of this very server
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        eventually(self.is_up, START_SECONDS)

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            with urlopen(f"{self.uri}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (URLError, OSError):
            return False

    def kill(self) -> None:
        """End it by SIGKILL, with all of its processes."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """Have it hang: connections are accepted, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on."""
        self._signal(signal.SIGCONT)

    def half_written(self, experiment: str) -> set[str]:
        """The trials of an experiment whose runs have not got the mark of whole ones."""
        query = "SELECT run_uuid, key, value FROM tags"
        # Not read-only: a server that was killed may have left what the next to come must undo.
        with closing(sqlite3.connect(f"file:{self.database}?mode=rw", uri=True)) as connection:
            rows = connection.execute(query).fetchall()
        tags: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for run, key, value in rows:
            tags[run][key] = value
        return {
            of["dps.trial"]
            for of in tags.values()
            if of.get("dps.experiment") == experiment and "dps.trial" in of
            if "dps.record" not in of
        }

    def _signal(self, number: int) -> None:
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self._process.pid)
            for process in [leader, *leader.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
