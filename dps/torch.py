"""Modules of torch on a parameter server: gradients and weights travel as flat buffers.

A worker attaches its module, and calls `step` after each `backward`. The server applies the update
rule. An optimizer of torch is only there for local steps between two exchanges with the server.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np

from dps.cluster.node.batches import Batches
from dps.cluster.node.pipeline import Closing, Pipeline
from dps.cluster.node.worker import NOTHING, Worker, check_worker
from dps.core.arguments import as_gradient
from dps.core.blocks import Arrays, FlatLayout
from dps.core.consistency import check_ahead
from dps.core.functions import AVERAGE, Function, average
from dps.core.ranges import described, integer_argument, one_of, refused, shown
from dps.errors import ConfigurationError

try:
    import torch
except ImportError as error:
    raise ImportError("dps.torch needs torch, which is not installed: pip install torch") from error

from dps.torch_device import DeviceMemory, copy_all, dense, moved_into  # which imports torch
from dps.torch_embedding import Embedding as Embedding
from dps.torch_embedding import connect, gradients
from dps.torch_embedding import embeddings as embeddings

Module = Any  # an `nn.Module`
Tensor = Any
Buffers = Literal["kept", "averaged"]
Inner = Callable[[list[Tensor]], Any]  # such as `torch.optim.AdamW`

# The argument `functions` of a parameter server for buffers that are averaged.
FUNCTIONS: Mapping[str, Function] = {AVERAGE: average}


def parameters(module: Module, buffers: Buffers = "kept") -> dict[str, np.ndarray]:
    """Return the first values for a parameter server of a module, on any device.

    They are copies of all trained parameters that are not empty, by their names in `state_dict`;
    with `buffers` "averaged" also those of its buffers of floats, such as the running statistics of
    batch norm. Those that are not float64 become float32. Raises `ConfigurationError` for an
    invalid argument, and for parameters that are complex, sparse or not initialised.
    """
    one_of("buffers", buffers, get_args(Buffers))
    named = {**_trained(module), **(_float_buffers(module) if buffers == "averaged" else {})}
    for name in (name for name, tensor in named.items() if tensor.is_meta):
        raise ConfigurationError(
            f"the module's {name!r} is on the device meta, without values: call "
            "module.to_empty(device='cpu'), and initialise it"
        )
    return {name: _array(tensor).copy() for name, tensor in named.items()}


def state_dict(module: Module, weights: Arrays) -> dict[str, Any]:
    """Return a copy of a module's `state_dict` with weights as of `ParameterServer.pull`."""
    _check_module(module)
    if not isinstance(weights, Mapping):
        raise refused("weights", weights, "name → array, as of ps.pull()")
    own = module.state_dict(keep_vars=True)
    state = {name: tensor.detach().clone() for name, tensor in own.items()}
    for name, array in weights.items():
        if name not in state:
            raise ConfigurationError(f"{shown(name)} is not a key of the module's state_dict")
        what, wanted = f"weights[{name!r}]", list(state[name].shape)
        if isinstance(array, torch.Tensor) and array.is_floating_point() and not array.is_meta:
            array = _array(array)
        gradient = as_gradient(what, array, "float64", ConfigurationError)
        if not isinstance(gradient, np.ndarray):
            raise refused(what, gradient, f"an array of floats{wanted}")
        if gradient.dtype != np.float64 or list(gradient.shape) != wanted:
            raise ConfigurationError(f"{what} is {described(gradient)}, expected floats{wanted}")
        for alias, tensor in own.items():
            if tensor is own[name]:  # itself, and tied parameters
                state[alias].copy_(torch.from_numpy(np.array(gradient)))
    return state


def attach(
    worker: Worker,
    module: Module,
    *,
    ahead: int = 0,
    inner: Inner | None = None,
    local_steps: int = 1,
    buffers: Buffers = "kept",
    average_every: int = 10,
) -> Replica:
    """Make a module a replica of the weights on the parameter server, and load them.

    With `inner`, each worker takes `local_steps` steps with its own optimizer, and then pushes the
    decrease of its weights, which the server takes for a gradient (Local SGD: Stich, ICLR 2019).
    With ``optimizer=Momentum(0.7, nesterov=True)`` on the server and `torch.optim.AdamW` as `inner`
    that is DiLoCo (Douillard et al. 2023, arXiv:2311.08105); `dps.Accumulated` averages several
    workers.

    Raises `ConfigurationError` if the parameter server has other parameters, the module is on
    several devices or an unsupported one, or another argument is invalid.

    Parameters
    ----------
    worker
        The argument of the training function.
    module
        On the CPU or a CUDA device; the server was started from the `parameters` of one like it.
        Its parameters get other memory, and must not be replaced afterwards. They may be frozen and
        thawed at any time.
    ahead
        As for `dps.Pipeline`; 0 with `inner`.
    inner
        A function that returns an optimizer of torch for a list of parameters, such as
        ``functools.partial(torch.optim.AdamW, lr=1e-3)``; None: gradients are pushed. Its state
        stays with the worker.
    local_steps
        How many steps of `inner` make an update; `Replica.exchange` makes one of fewer.
    buffers
        "kept": each worker has its own. "averaged": they are averaged over the workers after every
        `average_every` updates and at the end; for a server with `parameters(module, "averaged")`
        and `functions=dps.torch.FUNCTIONS`.
    """
    return Replica(worker, module, ahead, inner, local_steps, buffers, average_every)


def loader(batches: Batches, dataset: Any, **choices: Any) -> Iterator[Any]:
    """Return an iterator over the batches of leased data, as a `DataLoader` of torch makes them.

    Its processes read further batches while one is computed. Each needs exactly one push, as in a
    loop over `batches`.

    Parameters
    ----------
    batches
        As the training function gets them, of ``ps.run(train, data=len(dataset), batch_size=…)``.
    dataset
        With examples by number, of the same length in every worker.
    choices
        Other arguments of `DataLoader`, such as ``num_workers=2`` or ``collate_fn=…``.

    Raises
    ------
    ConfigurationError
        The dataset has another length, or an argument decides which examples are in a batch.
    """
    if not isinstance(batches, Batches):
        raise refused("batches", batches, "the Batches that a training function is called with")
    if batches.division.partitions or len(dataset) != batches.division.examples:
        raise ConfigurationError(
            f"the dataset has {len(dataset)} examples, and the data of the run "
            f"{batches.division.examples}: expected ps.run(…, data=len(dataset), batch_size=…)"
        )
    wrong = choices.keys() & {*("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")}
    if wrong or not choices.get("in_order", True):
        name = min(wrong, default="in_order")
        raise ConfigurationError(
            f"{name}={shown(choices[name])}: set the size and order of batches in "
            "ps.run(…, batch_size=…, shuffle=…)"
        )
    # Otherwise each lease at the end of a pass would start the processes again.
    lasting = {"persistent_workers": choices.get("num_workers", 0) > 0}
    made = torch.utils.data.DataLoader(
        dataset, batch_sampler=_Ahead(batches), **(lasting | choices)
    )
    return _loaded(batches, made)


class _Ahead:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self._batches.ahead())


def _loaded(batches: Batches, made: Iterable[Any]) -> Iterator[Any]:
    while batches.more():
        for batch in made:
            if batches.begin() is None:
                break
            yield batch


class Replica(Closing):
    """A `module` from `attach`, a context manager that closes it at the end. Not thread-safe.

    `inner` is its own optimizer, for a scheduler of torch; None without one.
    """

    def __init__(
        self,
        worker: Worker,
        module: Module,
        ahead: int,
        inner: Inner | None,
        local_steps: int,
        buffers: Buffers,
        average_every: int,
    ) -> None:
        check_worker(worker)
        check_ahead(worker.consistency, ahead)
        integer_argument("local_steps", local_steps, 1, "steps")
        if inner is None and local_steps > 1:
            raise ConfigurationError(
                f"local_steps={local_steps} needs inner=…, an optimizer of torch such as "
                "functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        if inner is not None and ahead:
            reason = "weights that lack this worker's last update would undo its local steps"
            raise ConfigurationError(f"ahead={ahead}: {reason}; expected 0 with inner")
        one_of("buffers", buffers, get_args(Buffers))
        integer_argument("average_every", average_every, 1, "updates")
        _check_module(module)
        self._embeddings = connect(module, worker)
        if self._embeddings and inner is not None:
            raise ConfigurationError(
                "inner: an optimizer of the worker cannot step rows of an embedding, which are on "
                "the servers; expected None"
            )
        trained, float_buffers = _trained(module, worker.layout.names), _float_buffers(module)
        self.module = module
        self._worker = worker
        self._trained = trained
        self._averaged = float_buffers if buffers == "averaged" else {}
        self._average_every, self._local_steps, self._updates = average_every, local_steps, 0
        wanted = {n: _described(tensor) for n, tensor in {**trained, **self._averaged}.items()}
        source = "dps.torch.parameters(module), with the same choice of buffers"
        worker.layout.require(wanted, "the module", source)
        shared = sorted(float_buffers.keys() & worker.layout.names.keys())
        if shared and buffers == "kept":
            raise ConfigurationError(
                "buffers='kept', but the parameter server holds the module's buffer "
                f"{shared[0]!r}; expected buffers='averaged', as the server was started"
            )
        flat = worker.layout.flat(trained)
        devices = {tensor.device for tensor in trained.values()}
        kind = MEMORIES.get(next(iter(devices)).type) if len(devices) == 1 else None
        if kind is None:
            names = ", ".join(sorted(map(str, devices))) or "none"
            raise ConfigurationError(
                f"the module's parameters are on the devices {names}, expected the CPU or one CUDA "
                "device"
            )
        stepped = {name: t for name, t in trained.items() if name not in worker.frozen}
        self._local = None if inner is None else LocalSteps(stepped, inner)
        self.inner = None if self._local is None else self._local.optimizer
        self._memory = kind(flat, trained, worker)
        self._load_buffers(worker.pull() if self._averaged else {})
        self._places = {name: tensor.data_ptr() for name, tensor in trained.items()}
        self._pipeline = Pipeline(worker, ahead, into=self._memory.weights)
        self._memory.load()
        if self._local is not None:
            self._local.begin()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters and rows with gradients, as in torch's optimizers, for `GradScaler`."""
        rows = [leaf for each in self._embeddings for leaf in each.touched]
        return [{"params": [*self._trained.values(), *rows]}]

    def zero_grad(self) -> None:
        """Drop gradients, such as those that `GradScaler` skips."""
        for tensor in self._trained.values():
            tensor.grad = None
        for each in self._embeddings:
            each.drop_gradients()

    def step(self) -> None:
        """Send the gradients of the last `backward`, and load the weights for the next one.

        With `inner`, it takes a local step, and after `local_steps` of them it is an `exchange`.
        The gradients are None afterwards. A parameter without a gradient stays as it is, with its
        optimizer state. Waits for the server while more than `ahead` updates are under way. Errors
        are those of `dps.Worker.push`, `GroupClosed` after `close`, and `ConfigurationError` if the
        parameters of the module, or their memory, have changed since `attach`.
        """
        self._pipeline.require_open()
        self._require_unchanged()
        if self._local is None:
            self._update({name: t.grad for name, t in self._trained.items() if t.grad is not None})
            return
        self._local.step()
        self.zero_grad()
        if self._local.taken >= self._local_steps:
            self.exchange()

    def exchange(self) -> None:
        """Send the decrease of the weights by the local steps since the last update, if any.

        Loads the weights for the next ones. If it fails, they are those before these local steps.
        Errors as for `step`.
        """
        self._pipeline.require_open()
        if self._local is not None and self._local.taken:
            self._update(self._local.undone())
            self._local.begin()

    def _update(self, own: Mapping[str, Tensor]) -> None:
        arrays = self._memory.collected(own) if own else NOTHING
        rows = gradients(self._embeddings)
        self.zero_grad()
        before = self._worker.read_point
        self._pipeline.push_pull(arrays, rows)
        if self._worker.read_point is not before:
            self._memory.load()
        self._updates += 1
        if self._updates % self._average_every == 0:
            self._average()

    def drain(self) -> None:
        """Wait for all updates under way, and load the weights after them; no-op if closed.

        With `inner` there are none, and local steps since the last update stay.
        """
        if not self._pipeline.is_open or self._local is not None:
            return
        self._pipeline.drain()
        self._memory.load()

    def close(self, wait: bool = True) -> None:
        """Wait for all updates under way, average buffers, and end the synchronisation.

        Local steps since the last update are sent, too.
        """
        try:
            if wait and self._pipeline.is_open:
                self.exchange()
                self.drain()
                self._average()
        finally:
            self._pipeline.close(wait)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the module's `state_dict`, after all updates under way."""
        self.drain()
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def _require_unchanged(self) -> None:
        now = _trained(self.module, self._trained)
        for name in (*self._trained, *now):
            if name not in self._trained:
                what = "requires gradients, and did not"
            elif name not in now:
                what = "is missing, and existed"
            elif now[name] is not self._trained[name]:
                what = "is another tensor than"
            elif now[name].data_ptr() != self._places[name]:
                what = "has other memory, such as after to() or half(), than"
            else:
                continue
            raise ConfigurationError(
                f"the module's {name!r} {what} when it was attached: attach a module after the "
                "last change. To train a layer later, start the server from a "
                "module where it requires gradients, and freeze it after attach"
            )

    def _average(self) -> None:
        if not self._averaged:
            return
        buffers = {name: _array(tensor) for name, tensor in self._averaged.items()}
        for shard in self._worker.apply(AVERAGE, buffers, 1 / self._worker.workers):
            for name, (spans, values) in shard.items():
                flat, at = buffers[name].reshape(-1), 0
                for start, stop in spans:
                    flat[start:stop] = values[at : at + stop - start]
                    at += stop - start
        self._load_buffers(buffers)

    def _load_buffers(self, arrays: Arrays) -> None:
        for name, tensor in self._averaged.items():
            tensor.copy_(torch.from_numpy(np.array(arrays[name])))


class LocalSteps:
    """The steps that a worker takes with its own `optimizer` between two updates."""

    def __init__(self, trained: Mapping[str, Tensor], inner: Inner) -> None:
        optimizer = inner(list(trained.values())) if callable(inner) else None
        if not isinstance(optimizer, torch.optim.Optimizer):
            expected = "a function from parameters to an optimizer, such as torch.optim.AdamW"
            raise refused("inner", inner, expected)
        self.optimizer = optimizer
        self._trained = trained
        self._before: dict[str, Tensor] = {}
        self.taken = 0  # since the last update
        self._changed: set[str] = set()

    def step(self) -> None:
        """Take a step."""
        self._changed |= {name for name, t in self._trained.items() if t.grad is not None}
        self.optimizer.step()
        self.taken += 1

    def undone(self) -> dict[str, Tensor]:
        """Return the decrease of the weights by the steps, which are undone."""
        names = [name for name in self._trained if name in self._changed]
        before, now = self._before, {name: self._trained[name].detach() for name in names}
        decrease = {name: before[name] - now[name] for name in names}
        copy_all([*now.values()], [before[name] for name in names])
        self.taken = 0
        self._changed.clear()
        return decrease

    def begin(self) -> None:
        """Take note of weights that were loaded."""
        self._before = {name: tensor.detach().clone() for name, tensor in self._trained.items()}


class HostMemory:
    """The memory of a module on the CPU, which computes with that of `weights` itself."""

    def __init__(self, flat: FlatLayout, trained: Mapping[str, Tensor], worker: Worker) -> None:
        self.weights = flat.over(np.empty(flat.nbytes, np.uint8))
        self._worker = worker
        views = [torch.from_numpy(self.weights[name]) for name in trained]
        self._copied = moved_into(list(trained.values()), views)

    def collected(self, gradients: Mapping[str, Tensor]) -> Arrays:
        """Return the gradients in memory that is sent without a copy."""
        arrays = self._worker.gradients(gradients)
        targets = [torch.from_numpy(arrays[name]) for name in gradients]
        copy_all(targets, [dense(tensor) for tensor in gradients.values()])
        return arrays

    def load(self) -> None:
        """Copy the weights into the parameters that are no views of them."""
        copy_all(*self._copied)


# The memory of modules, by the type of their device.
MEMORIES: dict[str, type[HostMemory | DeviceMemory]] = {"cpu": HostMemory, "cuda": DeviceMemory}


def _trained(module: Module, held: Container[str] = ()) -> dict[str, Tensor]:
    """Return the parameters, without empty ones, that are trained or `held` by the server."""
    _check_module(module)
    trained = {}
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigurationError(
                f"the module's {name!r} is not initialised yet: run the module once, on one example"
            )
        if (parameter.requires_grad or name in held) and parameter.numel():
            if parameter.is_complex() or parameter.layout != torch.strided:
                raise ConfigurationError(
                    f"the module's {name!r} is {parameter.dtype} and {parameter.layout}, expected "
                    "a dense tensor of real numbers"
                )
            trained[name] = parameter
    return trained


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise refused("module", module, "a torch.nn.Module")


def _float_buffers(module: Module) -> dict[str, Tensor]:
    kept, named = module.state_dict().keys(), module.named_buffers()
    return {n: b for n, b in named if n in kept and b.is_floating_point() and b.numel()}


def _array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array of the server's dtype, perhaps without a copy."""
    dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    array: np.ndarray = tensor.detach().to("cpu", dtype).contiguous().numpy()
    return array


def _described(tensor: Tensor) -> str:
    return f"{'float64' if tensor.dtype == torch.float64 else 'float32'}{list(tensor.shape)}"
