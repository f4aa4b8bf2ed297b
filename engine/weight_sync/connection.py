"""The groups between the trainer's rank 0 and the rollout engines, and the plan of what they carry.

Only rank 0 has one. It is built once and serves many updates; after a failure it is built anew.
"""

from __future__ import annotations

import uuid
from concurrent.futures import Future

from fsdpbench.engine.device import Device
from fsdpbench.engine.weight_sync.buckets import StagedBucket, StageMap, plan_update, rename
from fsdpbench.engine.weight_sync.digests import DigestSums
from fsdpbench.engine.weight_sync.fanout import Fanout
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.names import name_for
from fsdpbench.engine.weight_sync.records import Bucket
from fsdpbench.engine.weight_sync.source import SourceModel
from fsdpbench.engine.weight_sync.timings import PhaseClock
from fsdpbench.engine.weight_sync.xccl import BucketSender
from fsdpbench.errors import WeightSyncError


class XcclConnection:
    """One group for each pipeline stage of the engines, which all have the same stages."""

    def __init__(
        self,
        receivers: Fanout,
        source: SourceModel,
        device: Device,
        *,
        bucket_bytes: int,
        host: str,
    ) -> None:
        self.receivers, self.source, self.device = receivers, source, device
        self.host = host
        self.groups: dict[int, WeightGroup] = {}  # by stage
        traits = [engine.traits for engine in receivers.engines]
        self.num_stages = traits[0].pipeline_size
        self.world_size = 1 + sum(one.world_size for one in traits)
        self.greets = all(one.dialect == "local" for one in traits)
        self.joins_by_id = traits[0].joins_by_id  # all of them do, or none
        self.plan: tuple[StagedBucket, ...] = plan_update(
            source.specs,
            bucket_bytes,
            packed=all(one.takes_packed for one in traits),
            stages_of=StageMap(
                source.num_layers, self.num_stages, traits[0].dialect, source.is_tied
            ),
        )

    def connect(self) -> None:
        """Build the groups, one after the other. Raises WeightSyncError and is apart then.

        Collective over: each group.
        """
        unique = uuid.uuid4().hex[:8]  # servers keep the names of groups that they have left
        try:
            for stage in range(self.num_stages):
                self.groups[stage] = WeightGroup.listen(
                    f"fsdpbench-{unique}-{stage}",
                    self.world_size,
                    self.device,
                    self.receivers.timeout_seconds,
                    host=self.host,
                    stage=stage,
                    greets=self.greets,
                )
                self._join(self.groups[stage])
        except WeightSyncError:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Leave the groups at once; engines that wait in them are then free to listen.

        Never raises. The engines are to be told to leave, too.
        """
        groups, self.groups = self.groups, {}
        for group in groups.values():
            group.abort()

    def sender(self, clock: PhaseClock, digests: DigestSums | None) -> BucketSender:
        """Build the sender of one update."""
        return BucketSender(
            self.plan, self.groups, self.device, clock, self._announce, self.receivers, digests
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of an update on the wire, to one receiver."""
        return sum(spec.num_bytes for item in self.plan for spec in item.bucket.specs)

    def _join(self, group: WeightGroup) -> None:
        phase = f"joining the weight-update group of stage {group.address.stage}"
        if self.joins_by_id:
            group.mint_id()
        first_ranks = [1]
        for engine in self.receivers.engines:
            first_ranks.append(first_ranks[-1] + engine.traits.world_size)
        answers = self.receivers.begin(
            lambda index, engine: engine.init_weights_update_group(
                group.address_for(first_ranks[index])
            )
        )
        group.join(lambda: self.receivers.raise_failures(phase, answers))
        self.receivers.collect(phase, answers)

    def _announce(self, planned: StagedBucket) -> list[Future[None]]:
        return self.receivers.begin(
            lambda _, engine: engine.update_weights_from_distributed(
                self._bucket_for(engine.traits.dialect, planned.bucket), planned.stage
            )
        )

    def _bucket_for(self, dialect: str, bucket: Bucket) -> Bucket:
        return rename(bucket, lambda name: name_for(dialect, name, self.source.family))
