"""Kill and pause: each is carried out on a node's process, proven and recorded, or missed.

The cluster sends the signal (`dps.cluster.backends`). What a fault did is seen from outside, by the
state in which the system shows the process; that a signal was sent proves nothing.
"""

from __future__ import annotations

from dps.cluster.backends.base import Cluster
from dps.core.faults.plan import Way
from dps.errors import ConfigurationError
from dps.events import FaultMissed, Killed, Paused, Resumed, Sink
from dps.protocol.transport import Clock

PROOF_SECONDS = 5.0


class Striker:
    """Strikes nodes by name. Thread-safe as far as `nodes` is.

    Every method takes the number that the fault has in its plan, and returns whether it had its
    effect; if not, `FaultMissed` is recorded with the reason.
    """

    def __init__(self, nodes: Cluster, clock: Clock, emit: Sink) -> None:
        self._nodes = nodes
        self._clock = clock
        self._emit = emit

    def kill(self, fault: int, node: str, updates: int, by: Way = "signal") -> bool:
        """Kill a node's process and see that it is gone."""
        began = self._clock.now()
        ways = {
            "signal": self._nodes.kill,
            "requeue": self._nodes.requeue,
            "host": self._nodes.take_host,
        }
        try:
            pid = ways[by](node)
        except (KeyError, ProcessLookupError):
            return self.miss(fault, node, "there is no such process")
        except ConfigurationError as error:
            return self.miss(fault, node, str(error))
        gone = self._nodes.gone(node, PROOF_SECONDS)
        told = self._nodes.account(node)
        self._emit(Killed(began, fault, node, pid, updates, gone, by, told))
        return gone or self.miss(
            fault, node, f"process {pid} was still there {PROOF_SECONDS:g} s later"
        )

    def pause(self, fault: int, node: str, updates: int, held: bool = False) -> bool:
        """Stop a node's process and see that it is stopped.

        `held` says that it was stopped a moment ago, for this fault.
        """
        if not held and node in self._nodes.pids and self._nodes.stopped(node, 0.0):
            return self.miss(fault, node, "its process was stopped already")
        began = self._clock.now()
        try:
            pid = self._nodes.pause(node)
        except (KeyError, ProcessLookupError):
            return self.miss(fault, node, "there is no such process")
        stopped = self._nodes.stopped(node, PROOF_SECONDS)
        self._emit(Paused(began, fault, node, pid, updates, stopped))
        return stopped or self.miss(
            fault, node, f"process {pid} was not stopped {PROOF_SECONDS:g} s later"
        )

    def resume(self, fault: int, node: str) -> bool:
        """Let a stopped process go on and see that it runs; one killed meanwhile stays as it is."""
        pid = self._nodes.pids[node]
        if self._nodes.gone(node, 0.0):
            return False
        if not self._nodes.stopped(node, 0.0):
            return self.miss(fault, node, f"process {pid} did not stay stopped")
        began = self._clock.now()
        self._nodes.resume(node)
        running = self._nodes.running(node, PROOF_SECONDS)
        self._emit(Resumed(began, fault, node, pid, running))
        return running or self.miss(
            fault, node, f"process {pid} did not go on within {PROOF_SECONDS:g} s"
        )

    def miss(self, fault: int, node: str, reason: str) -> bool:
        """Record that a fault did not happen; returns False."""
        self._emit(FaultMissed(self._clock.now(), fault, node, reason))
        return False
