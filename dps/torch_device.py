"""Modules of torch on a CUDA device: gradients are filtered there, and copied once.

The result of clipping, selection and rounding a gradient is copied straight into the shared memory
that the server reads, and weights are copied from the shared memory that the server wrote. Each
segment of that memory is registered with the driver, once. Copies use a separate stream from the
module's, so they overlap if the worker is `ahead`.

The device may also be the CPU, which has no streams: the tests run the other code there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from dps.cluster.node.worker import MAX_LAYOUTS, Worker
from dps.cluster.transport.memory import Mapping as Segment
from dps.cluster.transport.memory import segment_of
from dps.core.blocks import (
    Block,
    Destination,
    Empty,
    FlatLayout,
    Gathered,
    Layout,
    ShardLayout,
    joined,
)
from dps.core.filters.chain import Counts, FilterChain, Outbox, Prepared
from dps.core.filters.device import HOST, Device
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
Event = Any  # of a stream; None on the CPU

READ_ONLY = 0x08  # cudaHostRegisterReadOnly
CLIPPED_TOGETHER = 1 << 22  # elements: some steps of clipping need a copy of this size
BITS = (128, 64, 32, 16, 8, 4, 2, 1)
_registering = threading.Lock()  # workers of one process may share a segment


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A shard's part of a gradient, uint8, which is complete at an event."""

    tensor: Tensor
    ready: Event

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(self.tensor.numel())


class Stream:
    """A stream of copies beside that on which the device computes; without effect on the CPU."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use this stream in the block, in the thread that runs it."""
        if self._stream is None:
            yield
            return
        # Otherwise what names no device would begin to use the first one of the process.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def event(self) -> Event:
        """Return the event that what is under way on the stream in use by now has ended."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it does not spin
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """Begin nothing more on the stream in use before an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def wait(event: Event) -> None:
    """Wait for an event in this thread."""
    if event is not None:
        event.synchronize()


class Accelerator(Device):
    """A device with tensors, and the memory that it can copy from."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._registers = {True: device.type == "cuda", False: device.type == "cuda"}

    def shared(self, array: np.ndarray) -> Tensor:
        """Return an array of the host as a tensor over its memory, registered if possible."""
        segment = segment_of(array)
        if segment is not None and segment.is_registered is None:
            with _registering:
                if segment.is_registered is None and self._registers[segment.is_writable]:
                    self._register(segment)
        # torch warns of arrays that are read-only.
        return torch.from_numpy(np.asarray(_Writable(array)))

    def is_quick(self, array: np.ndarray) -> bool:
        """Whether copies of the array need no thread to wait for them."""
        segment = segment_of(array)
        is_registered = segment is not None and bool(segment.is_registered)
        return self.device.type == "cpu" or is_registered

    def _register(self, segment: Segment) -> None:
        """Register a segment with the driver; many drivers refuse memory that is read-only."""
        driver = torch.cuda.cudart()
        flags = 0 if segment.is_writable else READ_ONLY
        with torch.cuda.device(self.device):
            failed = int(driver.cudaHostRegister(segment.address, segment.size, flags))
        segment.is_registered = not failed
        if failed:
            self._registers[segment.is_writable] = False
            with suppress(RuntimeError):  # the driver reports the error again
                torch.zeros(1, device=self.device)
        else:
            segment.before_unmapping = self._unregister

    def _unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(address)

    # -- what a chain of filters uses --------------------------------------------------------------

    def view(self, buffer: Part, stretch: Stretch) -> Tensor:
        """Return the elements of a stretch, without a copy."""
        return _typed(buffer.tensor, stretch)

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
        """Whether all numbers are finite."""
        return bool(numbers.isfinite().all())

    def norm(self, numbers: Tensor) -> float:
        """Return the Euclidean norm."""
        return float(torch.linalg.vector_norm(numbers))

    def selected(self, selection: Selection, numbers: Tensor, sending: Sending) -> Tensor:
        """Return the mask of a selection; those that need numpy get a copy on the host."""
        if type(selection) is SignificantlyModified:  # a subclass may need an array
            return selection.selected(numbers, sending)
        if type(selection) is TopK:
            return _largest(numbers, max(1, round(selection.share * len(numbers))))
        mask = HOST.selected(selection, self.on_host(numbers), sending)
        return torch.tensor(mask, device=self.device)

    def encoded(
        self, numbers: Tensor, mask: Tensor | None, form: Values, random: Random
    ) -> Section:
        """Encode the entries under a mask (None: all), as `encoding.encoded` does."""
        size = len(numbers)
        entries = size if mask is None else int(mask.count_nonzero())
        dtype = str(numbers.dtype).removeprefix("torch.")
        kind, keys = form_of_keys(size, entries, dtype, form), numbers.new_empty(0)
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
    """An outbox that filters gradients, as parts or arrays, on a device, and copies them."""

    waits = True

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
        self._copies = Stream(device.device)
        if old is not None:
            kept = {(name,): array for name, array in old.withheld().items()}
            self._residuals = {k: torch.tensor(a, device=device.device) for k, a in kept.items()}
            self._norms = {names: HOST.norm(array) for names, array in kept.items()}
            self.pushes, self.counts = old.pushes, old.counts

    def prepared(self, op: Operation, weights: np.ndarray | None) -> Prepared:
        """Return the filtered form of an operation; `NonFiniteGradient` if it holds NaN."""
        part: Any = op.gradient
        is_part = isinstance(part, Part)
        if not (is_part or self._chains):
            return Prepared(op, {}, {}, {}, Counts(), ())
        self.until_ready(op)
        with self._copies.used():
            if not is_part:
                part = Part(torch.tensor(part, device=self._accelerator.device), None)
            self._check(op, part)
            made = super().prepared(op._replace(gradient=part), weights)
            wait(self._copies.event())
        if self._chains:
            return made
        return replace(made, operation=made.operation._replace(codec=()), lossless=())

    def until_ready(self, op: Operation) -> None:
        """Wait until the device has computed the gradient."""
        wait(op.gradient.ready if isinstance(op.gradient, Part) else None)

    def commit(self, prepared: Prepared) -> None:
        """Keep the residuals of an operation that is on its way."""
        if self._chains:
            super().commit(prepared)

    def remainder(self, op: Operation) -> Prepared:
        """Return the residuals, of which there must be some, as one more update of raw values."""
        with self._copies.used():
            made = super().remainder(op)
            wait(self._copies.event())
        return made

    def _check(self, op: Operation, part: Part) -> None:
        device, arrays = self._accelerator, stretches(self._layout, op.pieces)
        if all(device.all_finite(device.view(part, run)) for run in _runs(arrays)):
            return
        name = next(s.name for s in arrays if not device.all_finite(device.view(part, s)))
        raise NonFiniteGradient(
            f"array {name!r} holds NaN or infinity; nothing of this update was applied"
        )


class DeviceGradients(OnDevice):
    """The gradients of some parameters, as `backward` has left them."""

    def __init__(self, gradients: Mapping[str, Tensor], memory: DeviceMemory) -> None:
        super().__init__(gradients)
        self._memory = memory

    def parts(self, names: Sequence[str], clipping: Clipped | None) -> Mapping[int, Gathered]:
        """Return the part of each shard: a `Part`, and the indices of its pieces."""
        return self._memory.parts({name: self[name] for name in names}, clipping)


class DeviceWeights(Destination):
    """Parameters that are views of one buffer on a device.

    Weights are copied to the device when they are expected, if no thread has to wait for that, and
    otherwise when the parameters are filled.
    """

    def __init__(self, layout: FlatLayout, buffer: Tensor, device: Accelerator) -> None:
        super().__init__(layout, dict(zip(layout.places, views(layout, buffer), strict=True)))
        self._copied: Event = None
        self._device = device
        self._stream = Stream(device.device)
        self._lock = threading.Lock()
        self._sources: dict[int, np.ndarray] = {}  # what `_arrived` is a copy of, kept until then
        self._arrived: dict[int, Tensor] = {}
        self._pinned: dict[int, Tensor] = {}  # for sources that the driver does not know
        self._pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for shard, extents in enumerate(layout.extents):
            if extents:
                nbytes = layout.owner.shards[shard].nbytes
                arrived = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
                self._arrived[shard] = arrived
                self._pairs[shard] = [
                    (buffer[at : at + n], arrived[there : there + n]) for at, there, _, n in extents
                ]
        self._filled = self._stream.event()  # before that, other tensors may have had this memory

    def __del__(self) -> None:
        wait(self._copied)  # before its memory, and that of the sources, is used again

    def expect(self, buffers: Mapping[int, np.ndarray]) -> None:
        """Copy the buffers to the device during its computations, if that needs no wait."""
        quick = {s: buffer for s, buffer in buffers.items() if self._device.is_quick(buffer)}
        if quick and self._lock.acquire(blocking=False):
            try:
                if self._copied is None or self._copied.query():
                    self._copy(quick)
            finally:
                self._lock.release()

    def fill(self, buffers: Mapping[int, np.ndarray]) -> None:
        """Write the weights into the parameters, before later computations use them."""
        with self._lock:
            self._copy(buffers)
            self._stream.wait(self._copied)
            pairs = [pair for s in self._pairs.keys() & buffers.keys() for pair in self._pairs[s]]
            copy_all([target for target, _ in pairs], [source for _, source in pairs])
            self._filled = self._stream.event()

    def _copy(self, buffers: Mapping[int, np.ndarray]) -> None:
        wanted = self._arrived.keys() & buffers.keys()
        new = {s: buffers[s] for s in wanted if self._sources.get(s) is not buffers[s]}
        if not new:
            return
        wait(self._copied)  # before the server may write to the previous sources again
        for shard in new:  # until all copies have begun
            self._sources.pop(shard, None)
        with self._stream.used():
            self._stream.wait(self._filled)
            try:
                for shard, buffer in new.items():
                    self._arrived[shard].copy_(self._quick(shard, buffer), non_blocking=True)
            finally:
                self._copied = self._stream.event()
        self._sources |= new

    def _quick(self, shard: int, buffer: np.ndarray) -> Tensor:
        """Return a tensor over a buffer, or over a copy of it that the driver knows."""
        source = self._device.shared(buffer)
        if self._device.is_quick(buffer):
            return source
        if shard not in self._pinned:
            self._pinned[shard] = torch.empty(buffer.nbytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[shard].copy_(source)


class Cut(NamedTuple):
    """A shard's part of some gradients: indices of its pieces, its blocks, and where they are."""

    pieces: tuple[int, ...]
    blocks: list[Block]
    places: list[Stretch]
    runs: list[Stretch]  # all of one dtype

    @property
    def nbytes(self) -> int:
        """Size of the part."""
        return self.places[-1].end


def _cut(shard: ShardLayout, pieces: tuple[int, ...]) -> Cut:
    chosen = joined([shard.pieces[i] for i in pieces]) if pieces else shard.joined
    blocks = [piece.block for piece in chosen]
    ends = [*accumulate(block.nbytes for block in blocks)]
    pairs = zip(blocks, [0, *ends], ends, strict=False)
    places = [Stretch(block.name, block.dtype, begin, end) for block, begin, end in pairs]
    return Cut(pieces, blocks, places, _runs(places))


def _runs(places: Iterable[Stretch]) -> list[Stretch]:
    """Return neighbouring stretches of one dtype as one."""
    alike = [[*group] for _, group in groupby(places, attrgetter("dtype"))]
    return [replace(group[0], end=group[-1].end) for group in alike]


class DeviceMemory:
    """The parameters of a module on one device, its gradients, and the copies of both."""

    def __init__(self, flat: FlatLayout, trained: Mapping[str, Tensor], worker: Worker) -> None:
        device = next(iter(trained.values())).device
        accelerator = Accelerator(device)
        self._layout = worker.layout
        self._stream = Stream(device)
        self._empty = partial(torch.empty, dtype=torch.uint8, device=device)
        self._cuts: dict[tuple[str, ...], dict[int, Cut]] = {}
        buffer = self._empty(flat.nbytes)
        self._copied = moved_into(list(trained.values()), views(flat, buffer, trained))
        self.weights = DeviceWeights(flat, buffer, accelerator)
        worker.filter_by(partial(DeviceOutbox, accelerator))

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
        cuts = self._cuts_of(tuple(gradients))
        packed = {shard: self._empty(cut.nbytes) for shard, cut in cuts.items()}
        targets = [_typed(packed[s], each) for s, cut in cuts.items() for each in cut.places]
        blocks = [block for cut in cuts.values() for block in cut.blocks]
        copy_all(targets, [flat[block.name][block.start : block.stop] for block in blocks])
        if clipping is not None and targets:
            _clip([_typed(packed[s], run) for s, cut in cuts.items() for run in cut.runs], clipping)
        ready = self._stream.event()
        of_shards: dict[int, Any] = {s: Part(tensor, ready) for s, tensor in packed.items()}
        return {shard: (part, cuts[shard].pieces) for shard, part in of_shards.items()}

    def _cuts_of(self, names: tuple[str, ...]) -> dict[int, Cut]:
        if names not in self._cuts:
            if len(self._cuts) >= MAX_LAYOUTS:
                self._cuts.clear()
            flat, shards = self._layout.flat(names), enumerate(self._layout.shards)
            self._cuts[names] = {
                number: _cut(shard, flat.pieces[number])
                for number, shard in shards
                if flat.extents[number]
            }
        return self._cuts[names]


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


def _typed(buffer: Tensor, stretch: Stretch) -> Tensor:
    return buffer[stretch.begin : stretch.end].view(getattr(torch, stretch.dtype))


def _clip(gradients: list[Tensor], clipping: Clipped) -> None:
    """Clip the parts of one gradient in place, unless it holds NaN or infinity."""
    # The device does not wait for the host, which does not look at the norm.
    gradients = [some for each in gradients for some in each.split(CLIPPED_TOGETHER)]
    if clipping.value is not None:
        for each in gradients:
            limit = min(clipping.value, torch.finfo(each.dtype).max)
            each.copy_(torch.where(each.isfinite(), each.clamp(-limit, limit), each))
    if clipping.norm is not None:
        # Squares of float64 may be too large where the norm is not.
        wide = [each.abs().amax() for each in gradients if each.dtype == torch.float64]
        scale = torch.stack(wide).max() if wide else torch.ones((), device=gradients[0].device)
        scale = scale.clamp(min=1)
        norms = [
            torch.linalg.vector_norm(each / scale, dtype=torch.float64)
            if each.dtype == torch.float64
            else torch.linalg.vector_norm(each, dtype=torch.float64) / scale
            for each in gradients
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms)) * scale + TINY
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
    drawn = torch.rand(steps.shape, generator=generator, device=sent.device, dtype=torch.float32)
    below = steps.floor()
    whole = (below + (drawn < steps - below)).clamp(-LEVELS, LEVELS).to(torch.int8)
    parts = scales.view(-1).contiguous(), whole.view(-1)[: len(sent)]
    return torch.cat([part.view(torch.uint8) for part in parts])
