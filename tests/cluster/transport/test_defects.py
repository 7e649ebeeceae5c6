"""An error of programming on a node: whoever asked is told once, and asks no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dps.errors import RemoteError
from dps.protocol.server.replica import Replica
from tests.support.clusters import nannied
from tests.support.training import COUNTING, count, params, patient_server, results

pytestmark = pytest.mark.cluster


async def have_a_defect() -> None:
    """Have replicas of this process look for something that is not there, as a defect would."""

    async def push(self: Replica, message: object) -> None:
        {}["cell"]

    Replica.push = push  # type: ignore[assignment, method-assign]


def test_a_defect_of_a_server_ends_the_training_with_what_it_is() -> None:
    with nannied(2) as client:
        for transport in ("auto", "stream", "dask"):
            choices: dict[str, Any] = {"optimizer": COUNTING, "transport": transport}
            with patient_server(client, params(), **choices) as ps:
                client.run(have_a_defect)
                with pytest.raises(RemoteError, match="KeyError: 'cell'"):
                    results(ps.run(partial(count, 3)))
