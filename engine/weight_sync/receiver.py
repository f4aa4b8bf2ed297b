"""The receiving end: buckets off the wire into the live tensors of a model.

    receiver = BucketReceiver(live, device)          # name -> tensor that the model computes with
    receiver.attach(group)                           # a WeightGroup that has joined
    receiver.receive(bucket)  ...                    # one for each bucket; blocks until applied
    digests = receiver.finish()                      # all tensors, or WeightSyncError
    receiver.abandon()                               # instead of finish, after any error

A model whose stages are apart has one receiver a stage, each with its own group and tensors.
Between the first bucket and `finish` the live tensors are a mixture: `state` is PARTIAL, and stays
so after an error until an update finishes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.digests import compute_digests
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.records import Bucket, TensorSpec
from fsdpbench.errors import WeightSyncError, list_names


class ReceiverState(enum.Enum):
    """What the live tensors are."""

    WHOLE = "whole"  # of one version
    PARTIAL = "partial"  # some of an update that has not finished


class BucketReceiver:
    """Applies buckets to live tensors, and knows what has come.

    `aliases` are further names of live tensors (tied weights) that a sender may use or leave out;
    a name and its alias count as one.
    """

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        device: Device,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.live, self.device = dict(live), device
        self.aliases = dict(aliases or {})  # alias -> name in live
        self.group: WeightGroup | None = None
        self.state = ReceiverState.WHOLE
        self.arrived: set[str] = set()
        self._stage = torch.empty(0, dtype=torch.uint8)  # bytes of one bucket, kept for the next

    def attach(self, group: WeightGroup) -> None:
        """Receive through this group from now on; a former one is closed."""
        self.detach()
        self.group = group

    def detach(self) -> None:
        """Leave the group, if there is one, and free the staging memory."""
        if self.group is not None:
            self.group.close()
            self.group = None
        self._stage = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        """Take one bucket off the wire and put its tensors in place.

        Refuses before anything is received if a tensor is unknown or has another shape or dtype.
        Collective over: the group. Raises WeightSyncError.
        """
        targets = [self._find(spec) for spec in bucket.specs]
        group = self.group  # `abandon` may take it away meanwhile
        if group is None:
            raise WeightSyncError("a bucket was announced before the weight-update group was made")
        self.state = ReceiverState.PARTIAL
        if bucket.packed:
            stage = self._staging(bucket.num_bytes)
            group.broadcast(stage).wait()
            for spec, offset, target in zip(bucket.specs, bucket.offsets, targets, strict=True):
                part = stage[offset : offset + spec.num_bytes]
                target.copy_(part.view(target.dtype).view(spec.shape))
        else:
            for spec, target in zip(bucket.specs, targets, strict=True):
                stage = self._staging(spec.num_bytes)
                group.broadcast(stage).wait()
                target.copy_(stage.view(target.dtype).view(spec.shape))
        # the stage is filled anew by the next broadcast, on a stream of its own
        self.device.synchronize()
        self.arrived.update(self.aliases.get(spec.name, spec.name) for spec in bucket.specs)

    def rehearse(self, num_bytes: int, repeats: int) -> None:
        """Take `repeats` messages off the wire and drop them, so that the wire can be measured.

        Collective over: the group. Raises WeightSyncError.
        """
        group = self.group
        if group is None:
            raise WeightSyncError("the wire was to be measured without a weight-update group")
        stage = self._staging(num_bytes)
        for _ in range(repeats):
            pending = group.broadcast(stage)
            if not self.device.is_asynchronous:  # else the device goes from one to the next
                pending.wait()
        pending.wait()

    def finish(self, *, with_digests: bool = True) -> dict[str, str]:
        """Check that every live tensor came, and return digests by the names in `live`.

        The tensors are of one version then. Raises WeightSyncError, and stays PARTIAL, if not.
        """
        if missing := [name for name in self.live if name not in self.arrived]:
            raise WeightSyncError(
                f"the update is incomplete: {len(missing)} of {len(self.live)} tensors did not "
                f"come: {list_names(missing)}. Both sides must hold the same model."
            )
        self.arrived.clear()
        self.state = ReceiverState.WHOLE
        return compute_digests(self.live.items()) if with_digests else {}

    def abandon(self) -> None:
        """Give up the update: ends a wait in the group, too. Never raises.

        The group is gone; the trainer makes a new one.
        """
        self.arrived.clear()
        group, self.group = self.group, None
        if group is not None:
            group.abort()

    def _find(self, spec: TensorSpec) -> torch.Tensor:
        target = self.live.get(self.aliases.get(spec.name, spec.name))
        if target is None:
            raise WeightSyncError(
                f"{spec.name}: no such weight here; known ones begin {list_names(self.live, 3)}. "
                "Trainer and rollout engine must hold the same model."
            )
        dtype = str(target.dtype).removeprefix("torch.")
        if tuple(target.shape) != spec.shape or dtype != spec.dtype:
            raise WeightSyncError(
                f"{spec.name}: {spec.dtype}{list(spec.shape)} was sent, but here it is "
                f"{dtype}{list(target.shape)}. Use the same model, and a wire_dtype equal to the "
                "engine's dtype: weights are not cast on arrival."
            )
        return target

    def _staging(self, num_bytes: int) -> torch.Tensor:
        if self._stage.numel() < num_bytes:
            self._stage = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._stage = torch.empty(num_bytes, dtype=torch.uint8, device=self.device.torch_device)
        return self._stage[:num_bytes]
