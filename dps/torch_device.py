"""Modules of torch on a CUDA device: gradients are filtered there, and copied once.

What is left of a gradient after clipping, selection and rounding is copied straight into the shared
memory that the server reads, and weights are copied from the shared memory that the server wrote.
Each segment of that memory is registered with the driver, once. Copies have a stream besides the
one that the module computes on, so they overlap if the worker is `ahead`.

The device may also be the CPU, which has no streams: the tests run all else there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from dps.cluster.node.worker import Worker
from dps.cluster.transport.memory import Mapping as Segment
from dps.cluster.transport.memory import segment_of
from dps.core.blocks import Destination, Empty, FlatLayout, Gathered, Layout
from dps.core.filters.chain import Counts, FilterChain, Outbox, Prepared
from dps.core.filters.device import HOST
from dps.core.filters.encoding import (
    BF16_MAX,
    BUCKET,
    LEVELS,
    Random,
    Section,
    Stretch,
    Values,
    form_of_keys,
    stretches,
)
from dps.core.filters.filter import Selection, Sending, SignificantlyModified, TopK
from dps.core.rules.wrappers import TINY, Clipped
from dps.core.updates import Encoding, Operation
from dps.errors import NonFiniteGradient
from dps.protocol.client.encoder import OnDevice

Tensor = Any
Mark = Any  # an event of a stream; None on the CPU

READ_ONLY = 0x08  # cudaHostRegisterReadOnly
BITS = (128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A shard's part of a gradient, uint8, which is complete at a mark."""

    tensor: Tensor
    ready: Mark

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(self.tensor.numel())


class Accelerator:
    """A `dps.core.filters.device.Device` with tensors, and a stream for its copies."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    # -- streams and memory ------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Mark what the device has been given to compute by now."""
        if self._copies is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        """Use the stream for copies, once the device has reached a mark."""
        if self._copies is None:
            yield
            return
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            yield

    def wait_for(self, mark: Mark) -> None:
        """Compute nothing more before the device has reached a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def finish(self) -> None:
        """Wait for all copies."""
        if self._copies is not None:
            self._copies.synchronize()

    def shared(self, array: np.ndarray) -> Tensor:
        """Return an array of the host as a tensor over its memory, registered if possible."""
        segment = segment_of(array)
        if self._copies is not None and segment is not None and segment.is_registered is None:
            self._register(segment)
        # torch warns of arrays that are read-only.
        return torch.from_numpy(np.asarray(_Writable(array)))

    def is_quick(self, array: np.ndarray) -> bool:
        """Whether copies of the array need no thread to wait for them."""
        segment = segment_of(array)
        return self._copies is None or bool(segment is not None and segment.is_registered)

    def _register(self, segment: Segment) -> None:
        driver = torch.cuda.cudart()
        flags = 0 if segment.is_writable else READ_ONLY
        with torch.cuda.device(self.device):
            failed = int(driver.cudaHostRegister(segment.address, segment.size, flags))
        segment.is_registered = not failed
        if failed:  # the driver repeats the error at the next call
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        else:
            segment.before_unmapping = driver.cudaHostUnregister

    # -- what a chain of filters uses --------------------------------------------------------------

    def view(self, buffer: Part, stretch: Stretch) -> Tensor:
        """Return the elements of a stretch, without a copy."""
        return buffer.tensor[stretch.begin : stretch.end].view(getattr(torch, stretch.dtype))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return several parts as one."""
        return torch.cat(list(parts))

    def zeros(self, count: int, dtype: str) -> Tensor:
        """Return zeros."""
        return torch.zeros(count, dtype=getattr(torch, dtype), device=self.device)

    def where(self, mask: Tensor, numbers: Tensor) -> Tensor:
        """Return the numbers, with 0 where the mask is false."""
        return torch.where(mask, numbers, 0)

    def all_finite(self, numbers: Tensor) -> bool:
        """Whether there is neither NaN nor infinity."""
        return bool(numbers.isfinite().all())

    def norm(self, numbers: Tensor) -> float:
        """Return the Euclidean norm."""
        return float(torch.linalg.vector_norm(numbers))

    def selected(self, selection: Selection, numbers: Tensor, sending: Sending) -> Tensor:
        """Return the mask of a selection; those that need numpy get a copy on the host."""
        if isinstance(selection, SignificantlyModified):
            return selection.selected(numbers, sending)
        if isinstance(selection, TopK):
            return _largest(numbers, max(1, round(selection.share * len(numbers))))
        mask = HOST.selected(selection, self.on_host(numbers), sending)
        return torch.from_numpy(mask).to(self.device)

    def encoded(
        self, numbers: Tensor, mask: Tensor | None, form: Values, random: Random
    ) -> Section:
        """Encode the entries under a mask (None: all), as `encoding.encoded` does."""
        size = len(numbers)
        entries = size if mask is None else int(mask.count_nonzero())
        kind, keys = form_of_keys(size, entries, _dtype(numbers), form), numbers.new_empty(0)
        if kind is None or mask is None:
            entries = -1
            sent = numbers if mask is None else self.where(mask, numbers)
        else:
            sent = numbers[mask]
            if kind == "bits":
                keys = _packed_bits(mask)
            elif kind:
                keys = mask.nonzero()[:, 0].to(torch.int16 if kind == "uint16" else torch.int32)
        match form:
            case "bf16":
                body = sent.clamp(-BF16_MAX, BF16_MAX).float().bfloat16()
            case "int8":
                body = _int8(sent, random())
            case "raw":
                body = sent
        keys, body = (each.contiguous().view(torch.uint8) for each in (keys, body))
        return Section(Encoding(entries, kind or "", form, len(keys), len(body)), keys, body)

    def values(self, section: Section, like: Tensor) -> Tensor:
        """Return the values of a section in bf16, the only form whose rounding is fed back."""
        return section.values.view(torch.bfloat16).to(like.dtype)

    def payload(self, sections: Sequence[Section], empty: Empty) -> np.ndarray:
        """Return the buffers of sections as one on the host, once the copies are finished."""
        both = (buffer for each in sections for buffer in (each.keys, each.values))
        buffers = [buffer for buffer in both if len(buffer)]
        payload = empty((sum(map(len, buffers)),), "uint8")
        if buffers:
            whole = buffers[0] if len(buffers) == 1 else torch.cat(buffers)
            self.shared(payload).copy_(whole, non_blocking=True)
        payload.flags.writeable = False
        return payload

    def on_host(self, numbers: Tensor) -> np.ndarray:
        """Return the numbers as an array."""
        array: np.ndarray = numbers.cpu().numpy()
        return array


class _Writable:
    """An array's memory as if it were writable, for `numpy.asarray`; nothing writes to it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        where = array.__array_interface__
        self.__array_interface__ = {**where, "data": (where["data"][0], False)}


class DeviceOutbox(Outbox):
    """An outbox that takes each gradient as a `Part`, or as an array, and filters it on a device.

    Without filters it only copies the gradient.
    """

    def __init__(
        self,
        device: Accelerator,
        layout: Layout,
        shard: int,
        chains: Mapping[str, FilterChain],
        empty: Empty,
        old: Outbox | None,
    ) -> None:
        super().__init__(layout, shard, chains, empty, device)
        self._accelerator = device
        if old is not None:
            kept = {(name,): array for name, array in old.withheld().items()}
            self._residuals = {k: torch.tensor(a, device=device.device) for k, a in kept.items()}
            self._norms = {names: HOST.norm(array) for names, array in kept.items()}
            self._pushes, self.counts = old.pushes, old.counts

    def prepared(self, op: Operation, weights: np.ndarray | None) -> Prepared:
        """Return the filtered form of an operation; `NonFiniteGradient` if it holds NaN."""
        device = self._accelerator
        part: Any = op.gradient
        assert part is not None
        if isinstance(part, np.ndarray):
            part = Part(torch.tensor(part, device=device.device), device.mark())
        with device.copying(after=part.ready):
            self._check(op, part)
            made = super().prepared(op._replace(gradient=part), weights)
            device.finish()
        return made if self._chains else _plain(made)

    def remainder(self, op: Operation) -> Prepared:
        """Return the residuals, of which there must be some, as one more update of raw values."""
        with self._accelerator.copying(after=None):
            return super().remainder(op)

    def _check(self, op: Operation, part: Part) -> None:
        device, arrays = self._accelerator, stretches(self._layout, op.pieces)
        for _, alike in groupby(arrays, attrgetter("dtype")):
            run = [*alike]
            if device.all_finite(device.view(part, replace(run[0], end=run[-1].end))):
                continue
            name = next(s.name for s in run if not device.all_finite(device.view(part, s)))
            raise NonFiniteGradient(
                f"array {name!r} holds NaN or infinity; nothing of this update was applied"
            )


def _plain(prepared: Prepared) -> Prepared:
    """Return a gradient without filters as it is sent without an outbox."""
    op = prepared.operation._replace(codec=())
    return replace(prepared, operation=op, counts=Counts(), lossless=())


class DeviceGradients(OnDevice):
    """The gradients of some parameters, as `backward` has left them."""

    def __init__(self, gradients: Mapping[str, Tensor], memory: DeviceMemory) -> None:
        self._gradients = gradients
        self._memory = memory

    def __getitem__(self, name: str) -> Tensor:
        return self._gradients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)

    def parts(self, names: Sequence[str], clipping: Clipped | None) -> Mapping[int, Gathered]:
        """Return the part of each shard: a `Part`, and the indices of its pieces."""
        return self._memory.parts({name: self._gradients[name] for name in names}, clipping)


class DeviceWeights(Destination):
    """Parameters that are views of one buffer on a device.

    Weights are copied to the device when they are expected, if that needs no thread to wait, and
    otherwise when the buffer is filled.
    """

    def __init__(self, layout: FlatLayout, buffer: Tensor, device: Accelerator) -> None:
        super().__init__(layout, dict(zip(layout.places, views(layout, buffer), strict=True)))
        self._device = device
        self._lock = threading.Lock()
        self._source: dict[int, np.ndarray] = {}  # that `_arrived` is a copy of; kept until then
        self._arrived: dict[int, Tensor] = {}
        self._to: dict[int, list[Tensor]] = {}
        self._from: dict[int, list[Tensor]] = {}
        self._copied: Mark = None
        self._filled: Mark = None
        for shard, extents in enumerate(layout.extents):
            if extents:
                nbytes = layout.owner.shards[shard].nbytes
                arrived = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
                self._arrived[shard] = arrived
                self._to[shard] = [buffer[e.begin : e.begin + e.nbytes] for e in extents]
                self._from[shard] = [arrived[e.in_shard : e.in_shard + e.nbytes] for e in extents]

    def expect(self, buffers: Mapping[int, np.ndarray]) -> None:
        """Copy the buffers to the device, beside what it computes."""
        with self._lock:
            self._copy({s: each for s, each in buffers.items() if self._device.is_quick(each)})

    def fill(self, buffers: Mapping[int, np.ndarray]) -> None:
        """Write the weights into the parameters, before anything else is computed with them."""
        with self._lock:
            self._copy(buffers)
            self._device.wait_for(self._copied)
            shards = self._arrived.keys() & buffers.keys()
            copy_all(
                [t for s in shards for t in self._to[s]], [t for s in shards for t in self._from[s]]
            )
            self._filled = self._device.mark()

    def _copy(self, buffers: Mapping[int, np.ndarray]) -> None:
        wanted = self._arrived.keys() & buffers.keys()
        new = {s: buffers[s] for s in wanted if self._source.get(s) is not buffers[s]}
        if not new:
            return
        if self._copied is not None:
            self._copied.synchronize()  # before the server may write to the previous buffers again
        with self._device.copying(after=self._filled):
            for shard, buffer in new.items():
                self._arrived[shard].copy_(self._device.shared(buffer), non_blocking=True)
            self._copied = self._device.mark()
        self._source |= new


class DeviceMemory:
    """The parameters of a module on one device, its gradients, and the copies of both."""

    def __init__(
        self, flat: FlatLayout, trained: Mapping[str, Tensor], worker: Worker, ahead: int
    ) -> None:
        device = next(iter(trained.values())).device
        self._device = Accelerator(device)
        self._layout = worker.layout
        buffer = torch.empty(flat.nbytes, dtype=torch.uint8, device=device)
        self._copied = moved_into(list(trained.values()), views(flat, buffer, trained))
        self.weights = DeviceWeights(flat, buffer, self._device)
        # One more than the updates under way: each is acknowledged before its memory is used again.
        sizes = [sum(e.nbytes for e in extents) for extents in flat.extents]
        empty = partial(torch.empty, dtype=torch.uint8, device=device)
        self._packed = cycle([[empty(size) for size in sizes] for _ in range(ahead + 1)])
        worker.filter_by(partial(DeviceOutbox, self._device))

    def collected(self, gradients: Mapping[str, Tensor]) -> DeviceGradients:
        """Return the gradients, to be pushed before the next ones are computed."""
        return DeviceGradients(gradients, self)

    def load(self) -> None:
        """Copy the weights into the parameters that are no views of them."""
        copy_all(*self._copied)

    def parts(
        self, gradients: Mapping[str, Tensor], clipping: Clipped | None
    ) -> dict[int, Gathered]:
        """Cut gradients by shard, and clip them as a whole."""
        flat = {name: dense(tensor).reshape(-1) for name, tensor in gradients.items()}
        pieces, packed = self._layout.flat(gradients).pieces, next(self._packed)
        whole: dict[int, Tensor] = {}
        targets, sources = [], []
        for shard in self._layout.shards_of(gradients):
            for piece, where in self._layout.shards[shard].packed(pieces[shard]):
                block, nbytes = piece.block, where.stop
                targets.append(packed[shard][where].view(getattr(torch, block.dtype)))
                sources.append(flat[block.name][block.start : block.stop])
            whole[shard] = packed[shard][:nbytes]
        copy_all(targets, sources)
        if clipping is not None:
            _clip(targets, clipping)
        ready = self._device.mark()
        of_shards: dict[int, Any] = {s: Part(tensor, ready) for s, tensor in whole.items()}
        return {shard: (part, pieces[shard]) for shard, part in of_shards.items()}


def views(flat: FlatLayout, buffer: Tensor, names: Iterable[str] = ()) -> list[Tensor]:
    """Return parameters (none named: all) as views of a buffer that is laid out like `flat`."""
    places = [flat.places[name] for name in names or flat.places]
    return [
        buffer[where].view(getattr(torch, spec.dtype)).view(spec.shape) for where, spec in places
    ]


def moved_into(tensors: list[Tensor], places: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Give parameters the memory of views; return those that cannot have it, and their views."""
    rest: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor, view in zip(tensors, places, strict=True):
        if tensor.dtype == view.dtype and tensor.is_contiguous():
            tensor.data = view
        else:
            rest[0].append(tensor.data)
            rest[1].append(view)
    return rest


def dense(tensor: Tensor) -> Tensor:
    """Return a gradient that may be sparse as a dense one."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy several tensors."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _dtype(numbers: Tensor) -> str:
    return str(numbers.dtype).removeprefix("torch.")


def _clip(gradients: list[Tensor], clipping: Clipped) -> None:
    """Clip the parts of one gradient in place, unless it holds NaN or infinity.

    The device does not wait for the host, which does not look at the norm.
    """
    if clipping.value is not None:
        limit = clipping.value
        for each in gradients:
            each.copy_(torch.where(each.isfinite(), each.clamp(-limit, limit), each))
    if clipping.norm is not None:
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) + TINY
        factor = torch.where(norm.isfinite(), (clipping.norm / norm).clamp(max=1), 1)
        for each in gradients:
            each *= factor


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Return where the `count` largest entries are, as `TopK` does."""
    magnitudes = numbers.abs()
    least = torch.topk(magnitudes, count, sorted=False).values.min()
    mask = magnitudes > least
    ties = (magnitudes == least).nonzero()[: count - int(mask.count_nonzero()), 0]
    mask[ties] = least > 0
    return mask


def _packed_bits(mask: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (padded * padded.new_tensor(BITS)).sum(1, dtype=torch.uint8)


def _int8(sent: Tensor, random: np.random.Generator) -> Tensor:
    # A scale for each bucket, and integer multiples of it: stochastic rounding, unbiased.
    padded = torch.nn.functional.pad(sent, (0, -len(sent) % BUCKET)).view(-1, BUCKET)
    scales = padded.abs().amax(1, keepdim=True) / LEVELS
    steps = torch.where(scales > 0, padded / scales, 0)
    generator = torch.Generator(sent.device).manual_seed(int(random.integers(2**63)))
    drawn = torch.rand(steps.shape, generator=generator, device=sent.device)
    below = steps.floor()
    whole = (below + (drawn < steps - below)).clamp(-LEVELS, LEVELS).to(torch.int8)
    parts = scales.view(-1).contiguous(), whole.view(-1)[: len(sent)]
    return torch.cat([part.view(torch.uint8) for part in parts])
