"""torch's RPC, where torch is installed: a remote object that holds the weights as a tensor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.peers.peer import LEARNING_RATE, Call, Peer, apart

SERVER = "server"


class Held:
    """Holds the weights."""

    def __init__(self, elements: int) -> None:
        import torch

        self.weights = torch.zeros(elements)

    def push_pull(self, gradient: Any) -> Any:
        """Apply a gradient and return the weights."""
        return self.weights.sub_(gradient, alpha=LEARNING_RATE)


@contextlib.contextmanager
def caller(nbytes: int) -> Iterator[Call]:
    """Start the other process, meet it, and have it make the weights."""
    import torch
    from torch.distributed import rpc

    with tempfile.TemporaryDirectory(prefix="dps-bench-") as folder:
        context = multiprocessing.get_context("spawn")
        server = context.Process(target=_serve, args=(folder,))
        server.start()
        _meet("caller", 0, folder)
        try:
            held = rpc.remote(SERVER, Held, args=(nbytes // 4,))
            gradient = torch.ones(nbytes // 4)
            yield lambda: held.rpc_sync().push_pull(gradient)
        finally:
            rpc.shutdown()
            server.join()


torch_rpc: Peer = partial(apart, caller)


def _serve(folder: str) -> None:
    """Be the other process, until both are done."""
    from torch.distributed import rpc

    _meet(SERVER, 1, folder)
    rpc.shutdown()


def _meet(name: str, rank: int, folder: str) -> None:
    from torch.distributed import rpc

    # torch says so of what its own RPC does.
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
    os.environ["TP_SOCKET_IFNAME"] = "lo"  # the name of the host may not lead anywhere
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meet"),
    )
