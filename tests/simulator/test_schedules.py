"""Random schedules of every strategy: no promise is broken, and a seed says all there is to say."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from tests.simulator.schedules.draw import named, schedule
from tests.simulator.schedules.strategies import CASES
from tests.simulator.simulate import simulate

HASH_SEEDS = ("0", "1")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_promise_is_broken(case: str) -> None:
    for seed, drawn in ((0, {}), (3, {"wide": True, "watched": True})):  # see `make simulate`
        violation = simulate(schedule(CASES[case], seed, **drawn)).violation
        assert violation is None, f"seed {seed}: {violation}"


@pytest.mark.slow
def test_a_seed_repeats_its_trace_in_another_process() -> None:
    assert len({_digest_with_hash_seed(seed) for seed in HASH_SEEDS}) == 1


def digest() -> str:
    """What the processes of the test above compare."""
    traces = [simulate(schedule(case, 3)).trace for case in list(CASES.values())[::5]]
    return hashlib.sha256(repr(traces).encode()).hexdigest()


def _digest_with_hash_seed(seed: str) -> str:
    program = "from tests.simulator.test_schedules import digest; print(digest())"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()}
    return subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)


@pytest.mark.parametrize(
    "name",
    [
        # A worker that joins is not kept waiting for a cut that needs what it sends next.
        "checkpoint, all, BSP:5000016:calm",
        # A node that came back before its loss was known does not count twice when one is drained.
        "two stores + wait:20261127000076:3,4",
        # A newcomer that started over while its copy was on the way has nothing.
        "chain(2), elastic:3000022",
        # A worker that is asked to leave is given up before it has sent what its filters withheld.
        "chain(2), BSP, filters:3196",
        # A worker that has skipped some updates enters again: its clock is not of those before.
        "chain(2) + functions, BSP:700101",
        # Somebody was said to hold what is wanted while a replica was still to be moved.
        "chain(3), reads any:40",
        # A worker that is evicted while it reads rows has dense weights from before.
        "none, BSP:8675309000119:calm",
        "checkpoint, BSP:8675309000063:0,2:calm",
        "checkpoint, BSP:8675309000067:1:calm",
        "checkpoint, BSP:8675309000222:3,6:calm",
        "checkpoint, all, BSP:900100000040:0,2:calm",
        "checkpoint, all, BSP:4411000002:0,1,2,3,4:calm",
        # A head that is out was still waiting for slow workers, to send weights with an ack.
        "chain(2), SSP(1):8675309000244:0,1,3",
        "chain(2) + continue, SSP(1):910035:0,2,3",
        # A worker is given up before its first request comes; nobody needs to wait for it then.
        "chain(2) + functions, BSP:8675309000299:0,1,2,4,5",
        # What a process was told whose name another one has taken is known to nobody.
        "none, BSP:3202046068000007:0,1:wide:calm",
        # Updates that were held back are refused to an earlier incarnation, not to the present one.
        "chain(2) + continue, SSP(1):66001000007:0,1,2,3,5:wide:calm",
        # Of two processes of one name, one has made an update of an earlier clock by a call.
        "chain(2) + functions, BSP:66002000005:2:wide",
        "chain(2) + functions, BSP:5500110022000081:wide",
        # A node is drained while the newcomer that is to have its replica is away.
        "chain(3) + mailbox:8675309000167",
        # Of two processes of one name the earlier is told to end; neither hears of the other
        "worker cache + functions:9170001000029:0,1:wide:calm",
        "none, elastic:1:wide",
        # What a group lost with its end is known to whoever brings it up again.
        "checkpoint, all:5150001000001:1:wide:calm",
        # Who has stopped for a move lacks what the others committed before it could come back.
        "chain(3) + mailbox:900100000113:0,1:calm",
        "chain(3) + mailbox:900100000017:0,1,2,3,4:calm",
        # It need not come back once others serve, though its move was given up, and they are lost.
        "chain(2) + continue:5500110022000118:0,1,4,5,6:calm",
        # A shard goes back twice: first on its old host, where the cut is damaged, then elsewhere.
        "checkpoint, all:127:wide",
        # A worker enters again, and what it held back before is refused; that is no reason to
        # enter once more.
        "chain(2) + continue, SSP(1):173:wide",
        # A shard is served elsewhere when its host starts over and gets what it was sent before.
        "worker cache + continue, filters:5500110022000019:wide:calm",
        # A shard goes back to clocks of a time before all left, which were further than those now.
        "checkpoint, BSP:5500110022000003:0,2,3:wide:calm",
        # A shard goes back to a copy from before it went back the first time, which has some of
        # what that had cost.
        "worker cache:5500110022000034:0,1,2,3,4,6:calm",
        "worker cache + functions:66000015",
        # A shard is restored to a state before another process took a name, and applies updates of
        # the first one.
        "worker cache + functions:20261353000011:0,1,2,4,6,7,8,9,10,11:wide:watched:calm",
        # The machine of a group that has ended is up again; another group has its nodes by now.
        "checkpoint:5500110022000065:0,1:wide",
        # Who stood still beyond its lease commits what nobody is told of.
        "checkpoint, seconds:5500110022000093:wide:calm",
        # The earlier one of two processes of a name ends, and with it what it held back.
        "worker cache + continue:5500110033000005:2,3,4,5,6:wide",
        # A process whose name another one has had since leaves an update in the mailbox.
        "stateless + functions:5500110022000121:0,1:wide:calm",
        # A node is drained while it is to be used no more in its present life.
        "chain(3), reads any:551900330077000009:1,2,3,4,5,7:wide",
        "stateless, filters:5500110022000191:0,1,3:wide:calm",
        # The newcomer of a move acks before it is known that what it was given is saved in time.
        "checkpoint, seconds:771300450001000002:0,1,2,3,4:calm",
        # An evicted worker continues to push, so the acknowledgements that it received are unknown.
        "none, ring:33701000018:0,1,2,3,4,5,6,7,9:watched:calm",
        # A worker fails while its call is durable, and not acknowledged.
        "chain(2) + functions:33501000007:0,2,3,4,10:wide:watched:calm",
        # A shard that can only be restored off the ring moves back to it.
        "checkpoint, ring:339261126000090:watched",
        # A replica is restored from a checkpoint below, its reply is lost, and another one is, too.
        "chain(2) over checkpoint:339261126000050:watched",
        # The coordinator is paused while the other copy of what a stopped server has is lost.
        "chain(2), pull filters:339262203000143:wide:watched",
        # A node is drained while fewer servers hold shards than a chain has replicas.
        "chain(3), reads any, pull filters:339262203000139:wide:watched",
        # A server starts over, and ends while another one restores what it had.
        "checkpoint, seconds, elastic:339262203000138:watched",
        # The only store that has the state is out of reach of its server, which fills another.
        "two stores + wait:33701000015:0,7:wide:watched:calm",
        # A head that is busy while all go back answers that its lease is over, and then renews it.
        "checkpoint, auto, all:33501000002:0,2,4,5:watched:calm",
        # A store starts over, and is given the restored state before the shard is served.
        "stateless over checkpoint:2057280811000003:0,4,6:wide:watched:calm",
        # A damaged checkpoint is refused by one attempt to restore after the other.
        "two stores over checkpoint:940054:0,1,2,3,4,5,6:calm",
        # A shard is moved while it is waited for what is due to be in a checkpoint.
        "two stores over checkpoint:930006",
        # A request to go back to a checkpoint arrives again when the shard is served from it.
        "chain(2) over checkpoint, seconds, elastic:77003302000016:0,1,2,3,4,5",
        # Who is given the newest checkpoint has not served when the store is lost again: that
        # checkpoint is still there.
        "stateless over checkpoint:240",
        # A chain has a new tail before the old one has written what is unsaved; no more comes.
        "chain(2) over checkpoint, seconds:7",
        # A worker ends before all shards have acked, and one of those that had has gone back.
        "checkpoint, all, BSP:6600110022000070:2,4",
        # A worker that thinks for long between its updates, and begins anew, takes its time.
        "checkpoint, seconds, elastic:6600110022000097:wide",
        # A worker is given up whose name another process has already, which has yet to enter.
        "shared store + wait:6600110022000131:0:wide",
        # Two processes of a name enter by turns: none knows what the other one was told.
        "none, BSP:5500110033000011:0,1,2,3:wide:calm",
        # Two processes of a name are given up one after the other, and only the later one lives.
        "none, BSP:7700110022000043:0,1,4:wide:calm",
        # The later of two processes of a name is given up before it has entered; the earlier calls.
        "chain(2) + functions, BSP:8800110505000293:wide",
        # A restored shard is told a worker's clock with all that is lost: what was in a mailbox,
        # what the worker had held back, and where it joined.
        "stateless, BSP:5500110022000021:wide",
        "chain(2) + continue, SSP(1):93004:0,1,3,4:wide",
        "none, BSP:93002:3,6:wide",
        # A chain is asked twice to be extended, and the newcomer keeps the earlier of two copies.
        "chain(3), reads any:7720331190045000008:0,1,2,3,4,5,6,7",
        # The store is lost when the state has come from it, but is not served yet.
        "stateless:5500110022000109:0,1,2:wide:calm",
        "stateless:5500110033000017:0,1,2:wide:calm",
        # A host that was given up is on the ring again, in another life, before anybody looks.
        "chain(2), ring:310042",
        # A group ends, and with it a worker whose name another process has already.
        "checkpoint, all, filters:7700110022000059:1,2,3,4:wide:calm",
        # A checkpoint knows a call of an incarnation, and no push: its number must not come again.
        "checkpoint + functions:7700110033000063:0,1:wide:calm",
        # A host that has got initial values, and no mail, never serves them: another one gets them.
        "stateless, filters:7700110033000077:1,2,3:wide:calm",
        # A host that has got a copy never serves it; its worker is lost, and no other has one.
        "worker cache + continue, filters:8800110101000235:2,3,5:wide:calm",
        # What was sent again and acked is also in a copy of before, and is reported all the same.
        "worker cache + functions:8800110202000113:wide",
        # A host has applied mail, and never serves: the next one needs what was in the mailbox.
        "checkpoint + mailbox:2:0,1,2,3,6,9:wide:calm",
        "checkpoint + mailbox:16:1,2,3:wide:calm",
        # A replica is at work for longer than a call takes, and is not to be taken for unreachable.
        "chain(3) + mailbox:8800110101000177:0,1:wide:calm",
        # A shard acknowledges an update that another one has refused already, and goes back.
        "checkpoint, all, BSP:8800110404000647:wide:calm",
        # A damaged checkpoint held a round that had been waiting for it, and was not acked before.
        "checkpoint, BSP:8800110404000578:0,2,4:calm",
        # A mailbox is drained; its mail goes to the store's host since, and is lost with that.
        "stateless:8800110606000569:1,2,3:wide:calm",
        # All shards go back while a worker that has joined them catches up on one alone.
        "checkpoint, all:8800110606000566:2,3,4,5",
        # Both cuts that are kept would be damaged, so that no shard has anything to go back to.
        "checkpoint, all, BSP:8800111010000399:0,1,2,10,11:wide:calm",
        # The next process of a name is let in, and the one before does not know of it yet.
        "chain(2), SSP(1):8800111212000299:0,1:wide:calm",
        # A worker ends before one shard has acked its update again, which brings withheld ones too.
        "checkpoint, all, filters:8800111212001048:0,1,2,4,5,7:calm",
        # What a copy has brought back is counted in the next ack, and may be reported again.
        "worker cache:8800111212001122",
        # A mailbox is given up, and the only other one is out of reach of a shard's server.
        "stateless, two stores:339271201000089:wide",
        # Both copies are stopped, and the coordinator is paused: it hears of one before the other.
        "chain(2), busy:339271202000087:6,8,9,10:wide:watched:calm",
        # An update is acked, its shard goes back, it is refused, and its worker ends.
        "checkpoint, all:339271201000041:0,1,2:wide:calm",
        # A worker ends while one of its gradients is copied, to be buffered in that worker.
        "chain(2) + continue, SSP(1):20261141000131:0,1,2,3,4:wide:watched:calm",
        # A server cannot reach one store's mailbox, and the other store's is lost.
        "two stores over checkpoint:1223390082000003:wide:watched",
        # The tail has shown an update whose ack was lost; the head is alone when the tail is lost.
        "chain(2) over checkpoint, busy:20261151000240:0,1",
        # A worker that was given up, but lives, pushes without a pull and is lost.
        "checkpoint, all, pull filters:20261151000056:0,1,2,3,5,6,7:calm",
        # A process is busy for so long that its group has ended, and the next one is brought up.
        "checkpoint + mailbox:20261151000247:0,1,4,6:wide:watched",
        # A shard restarts from initial values, with one buffered gradient; workers then join.
        "stateless, BSP:20261181000130:0,1,2,3,4,5:watched:calm",
        # The task that renews a lease fails again while it pauses after a failure.
        "chain(2), elastic, pull filters:20261201000071:0,1,2,7:wide:watched",
        # The task that ends a worker fails, after another of its tasks has failed.
        "chain(2), ring:20261221000007:0,1,2,6,7,9,10,11,12,13:wide:watched:calm",
        # A repeated request to restore a shard writes a state after a later one.
        "partial checkpoint, sync:20261211000117:0,1,2,3:wide",
        # A move's source is given up; its target serves alone, and crashes.
        "none:20261201000091:8,9,11,12,13,14,15:wide:watched",
        # A store starts over before the coordinator counts on it again, and the server is lost.
        "stateless, ring:20261231000171:2,3,4,6,7:wide:watched:calm",
        # Both replicas are stopped; a delayed renewal of one arrives before the other is killed.
        "chain(2) + continue, SSP(1):20261201000095:0,1,2,3,4:wide:watched:calm",
    ],
)
def test_what_was_mended_stays_so(name: str) -> None:
    violation = simulate(named(name)).violation
    assert violation is None
