"""How a process is slowed down: stopped and let go on in turns, many times a second.

Each turn is far shorter than a lease, and than the time for which a process must be stopped to be
killed. What it is owed of stopped time is counted from the time that it really ran, so the factor
holds on a busy machine too.
"""

from __future__ import annotations

from dps.chaos.effect import Seen
from dps.chaos.kill_and_pause import PROOF_SECONDS
from dps.cluster.backends.base import Cluster
from dps.cluster.platform import Running, platform_of

TURN = 0.05
SHORTEST_RUN = 0.002
LONGEST_STOP = 0.2  # of the silence after which a process is given up
PROOF_TURNS = 5
LONGEST_PROOF = 2.0


class Slowdown:
    """Leaves a process one part in `factor` of the time.

    Parameters
    ----------
    seconds
        How long it lasts, unless `end` is called before.
    silence
        How long a process may be silent before it is given up, in seconds.
    """

    proven = True  # `begin` has seen it stopped

    def __init__(
        self, nodes: Cluster, node: str, factor: float, seconds: float, silence: float
    ) -> None:
        self._nodes = nodes
        self._node = node
        self._pid = nodes.pids[node]
        self._factor = factor
        self._longest_stop = LONGEST_STOP * silence
        self._seconds = seconds
        self._platform = platform_of(nodes.client)
        self._over = self._platform.flag()
        self._stopped = 0.0
        self._turns = 0
        self._running: Running

    def begin(self) -> Seen:
        """Take turns from now on, in a thread, and see for how much of the time it is stopped."""
        if self._nodes.gone(self._node, 0.0):
            raise ProcessLookupError("there is no such process")
        self._began = self._looked = self._now()
        self._cpu = self._cpu_seconds()
        self._running = self._platform.start(self._take_turns, f"dps-slow-{self._node}")
        until = self._began + min(LONGEST_PROOF, self._seconds / 2)
        while not (self._turns >= PROOF_TURNS and self._seen().effective):
            if self._over.wait(TURN / 2) or self._now() > until:
                break
        return self._seen()

    def end(self) -> Seen:
        """Let the process go on, and see that it runs."""
        self._over.set()
        self._running.join()
        evidence, effective = self._seen()
        if self._nodes.gone(self._node, 0.0):
            return Seen(f"{evidence}; it has ended meanwhile", True)
        if not self._nodes.running(self._node, PROOF_SECONDS):
            return Seen(f"{evidence}; it did not go on within {PROOF_SECONDS:g} s", False)
        return Seen(evidence, effective)

    def _take_turns(self) -> None:
        owed, run = 0.0, max(SHORTEST_RUN, TURN / self._factor)
        running_since = self._now()
        try:
            while not self._over.wait(run) and running_since < self._began + self._seconds:
                self._nodes.pause(self._node)
                owed += (self._now() - running_since) * (self._factor - 1)
                owed -= self._stay_stopped(min(owed, self._longest_stop))
                running_since = self._now()
        except ProcessLookupError:  # it was killed meanwhile
            return

    def _stay_stopped(self, seconds: float) -> float:
        """Keep the process stopped for a while, then let it go on; return how long it was."""
        began = self._now()
        try:
            # On a busy machine it stops only when it is next given a core.
            seen = self._nodes.stopped(self._node, self._longest_stop)
            stopped_since = self._now()
            self._over.wait(max(0.0, began + seconds - self._now()))
            seen = seen and self._nodes.stopped(self._node, 0.0)
        finally:
            self._nodes.resume(self._node)
        self._looked = self._now()
        if seen:
            self._stopped += self._looked - stopped_since
            self._turns += 1
        return self._looked - began

    def _seen(self) -> Seen:
        elapsed = max(self._looked - self._began, SHORTEST_RUN)  # until the end of the last turn
        share = self._stopped / elapsed
        slower = 1 / max(1 - share, 1e-3)
        used = max(0.0, self._cpu_seconds() - self._cpu) / elapsed
        evidence = (
            f"process {self._pid} was seen stopped for {share:.0%} of {elapsed:.2f} s, in "
            f"{self._turns} turns ({slower:.2f} times slower), and used {used:.0%} of a core"
        )
        wanted = 1 + (self._factor - 1) / 2
        if slower < wanted:
            evidence += f"; at least {wanted:g} times was wanted, for factor {self._factor:g}"
        return Seen(evidence, slower >= wanted)

    def _cpu_seconds(self) -> float:
        try:
            return self._nodes.cpu_seconds(self._node)
        except ProcessLookupError:
            return self._cpu

    def _now(self) -> float:
        return self._platform.clock.monotonic()
