"""The sender of an update through process groups: gather, pack, broadcast, one bucket ahead.

    ranks    0..n-1   gather b0 | gather b1          | gather b2          | ...
    rank 0            pack b0   | pack b1            | pack b2            |
                                | broadcast b0 ------| broadcast b1 ------|

Rank 0 packs a bucket on its current stream; the backend broadcasts it on a stream of its own, while
the next one is gathered. One bucket is pending at a time, so two buffers suffice. The other ranks
only take part in the gathers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.buckets import StagedBucket
from fsdpbench.engine.weight_sync.digests import DigestSums
from fsdpbench.engine.weight_sync.fanout import Fanout
from fsdpbench.engine.weight_sync.groups import PendingBroadcast, WeightGroup
from fsdpbench.engine.weight_sync.records import Bucket, TensorSpec
from fsdpbench.engine.weight_sync.source import NamedTensor
from fsdpbench.engine.weight_sync.timings import PhaseClock
from fsdpbench.errors import WeightSyncError

Announce = Callable[[StagedBucket], Sequence[Future[None]]]  # to all receivers, in their order
PHASE = "receiving a bucket"
GRACE_SECONDS = 2.0  # for a receiver to say why it has left


@dataclass
class PendingBucket:
    """A bucket that is on the wire; its buffers must not change before it has settled."""

    planned: StagedBucket
    answers: Sequence[Future[None]]  # of the receivers, when they have applied it
    broadcasts: list[PendingBroadcast]
    began: float  # perf_counter
    begin: Any = None  # event before the broadcasts, and after; None on the CPU
    end: Any = None


class BucketSender:
    """Sends one update; made anew for each, so that its buffers are not kept in between.

    On rank 0 of the trainer, on whose device all tensors are. With `digests` the values on the wire
    are summed up, too.
    """

    def __init__(
        self,
        plan: Sequence[StagedBucket],
        groups: Mapping[int, WeightGroup],
        device: Device,
        clock: PhaseClock,
        announce: Announce,
        receivers: Fanout,
        digests: DigestSums | None = None,
    ) -> None:
        self.plan, self.groups, self.device, self.clock = plan, groups, device, clock
        self.announce, self.receivers, self.digests = announce, receivers, digests
        self._summed: set[str] = set()
        # waits for broadcasts, so that their ends are timed apart from the gathers that go on
        self._ends = device.stream() if device.is_asynchronous else None
        sizes = [item.bucket.num_bytes for item in plan if item.bucket.packed]
        self._buffers = [self._allocate(max(sizes)) for _ in sizes[:2]]

    @torch.no_grad()
    def send(self, named_tensors: Iterator[NamedTensor]) -> None:
        """Send all buckets. The iterator gives the plan's tensors in the plan's order.

        Raises WeightSyncError; the caller then exhausts the iterator, since the other ranks do.
        """
        pending: PendingBucket | None = None
        name, whole = "", None
        for planned in self.plan:
            parts = self._open(planned.bucket)
            for spec, part in zip(planned.bucket.specs, parts, strict=True):
                if whole is None or name != spec.name:  # a tied one is sent to two stages in a row
                    name, whole = self._next(named_tensors, spec)
                self._pack(spec, whole, part)
            if pending is not None:
                self._settle(pending)
            pending = self._launch(planned, parts)
        if pending is not None:
            self._settle(pending)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device.torch_device)

    def _open(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return where the bucket's tensors are to be put: views of one buffer, or one each."""
        if not bucket.packed:
            return [
                self._allocate(spec.num_bytes).view(getattr(torch, spec.dtype)).view(spec.shape)
                for spec in bucket.specs
            ]
        self._buffers.reverse()  # the other one is on the wire
        run = self._buffers[0]
        return [
            run[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)
        ]

    def _next(self, named_tensors: Iterator[NamedTensor], spec: TensorSpec) -> NamedTensor:
        with self.clock.phase("gather"):
            name, whole = next(named_tensors, ("nothing", None))
        if whole is None or name != spec.name or tuple(whole.shape) != spec.shape:
            found = name if whole is None else f"{name} {list(whole.shape)}"
            raise WeightSyncError(
                f"{spec.name} {list(spec.shape)} was planned, but the model gave {found}; connect "
                "again after the model has changed"
            )
        return name, whole

    def _pack(self, spec: TensorSpec, whole: torch.Tensor, part: torch.Tensor) -> None:
        with self.clock.phase("pack"):
            part.copy_(whole)
        if self.digests is not None and spec.name not in self._summed:
            self._summed.add(spec.name)
            with self.clock.phase("verify"):
                self.digests.add(spec.name, part)

    def _launch(self, planned: StagedBucket, parts: Sequence[torch.Tensor]) -> PendingBucket:
        group = self.groups[planned.stage]
        answers = self.announce(planned)
        bucket = planned.bucket
        messages = [self._buffers[0][: bucket.num_bytes]] if bucket.packed else parts
        began = time.perf_counter()
        begin = None if self._ends is None else self.clock.mark()
        pending = PendingBucket(planned, answers, [group.broadcast(m) for m in messages], began)
        if self._ends is not None:
            with self.device.use_stream(self._ends):
                pending.broadcasts[-1].work.wait()
                pending.begin, pending.end = begin, self.clock.mark()
        return pending

    def _settle(self, pending: PendingBucket) -> None:
        """Wait until a bucket has passed and all receivers have applied it."""

        def check() -> None:
            self.receivers.raise_failures(PHASE, pending.answers)

        try:
            for broadcast in pending.broadcasts:
                broadcast.wait(check)
        except WeightSyncError:
            wait(pending.answers, GRACE_SECONDS, FIRST_EXCEPTION)
            check()  # what a receiver says is nearer to the cause than a lost connection
            raise
        passed = pending.broadcasts[-1].ended_at or time.perf_counter()
        if pending.begin is None:
            self.clock.add("transfer", passed - pending.began)
        else:
            self.clock.add_events("transfer", pending.begin, pending.end)
        self.receivers.collect(PHASE, pending.answers)
        self.clock.add("apply", max(0.0, time.perf_counter() - passed))
