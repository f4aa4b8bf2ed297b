"""What a trial that sends weights leaves: each round's phases, what follows from them, the limits.

Pure. pause is what the rollout side notices: from the word to stop generating to the word to go on.
The other phases are those of the trainer's rank 0, and of the slowest receiver where receivers take
part; phases overlap, so their sum may exceed the pause. Figures are medians of the
steady rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict

RoundKind = Literal["cold", "warmup", "steady"]


class _SyncPart(BaseModel):
    """Base of the parts; a reader skips keys that were added after it."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class SyncSeconds(_SyncPart):
    """Seconds of one update by phase; 0 where a channel has no such phase."""

    pause_seconds: float = 0.0
    gather_seconds: float = 0.0
    """Shards to whole tensors."""
    pack_seconds: float = 0.0
    """Whole tensors to the wire's dtype and into buckets."""
    write_seconds: float = 0.0
    """disk: into files, before the pause."""
    transfer_seconds: float = 0.0
    """xccl: on the wire; disk: into files and out of them, so it contains write and apply."""
    apply_seconds: float = 0.0
    """xccl: from the wire into place; disk: out of files into place. The slowest receiver's."""
    verify_seconds: float = 0.0


class SyncRound(SyncSeconds):
    """One update."""

    kind: RoundKind
    """The first one, the second one, and those that count."""


class SyncRecord(SyncSeconds):
    """All updates of a trial; its own seconds are medians of the steady rounds."""

    mode: Literal["xccl", "disk"]
    receivers: int
    receiver_devices: list[str] = []
    bytes: int
    """Bytes of one version on the wire or in its folder."""
    num_buckets: int = 0
    connect_seconds: float = 0.0
    """Until all receivers are joined; their start is not in it."""
    rounds: list[SyncRound] = []
    bandwidth_bytes_per_second: float | None = None
    broadcast_limit_bytes_per_second: float | None = None
    """A large flat buffer over the same group, in the same run; None without xccl."""
    share_of_broadcast_limit: float | None = None
    disk_write_bytes_per_second: float | None = None
    disk_read_bytes_per_second: float | None = None
    """Plain files beside the versions, in the same run, with threads; None without disk."""
    share_of_disk_limit: float | None = None
    """Time of a plain write and read over that of the version's files."""
    verified: bool
    """Whether checksums of all tensors and the log-probs were compared, and agreed."""
    logprob_error: float | None = None
    """Largest absolute difference to the trainer's log-probs on a fixed prompt."""
    host_growth_bytes: int | None = None
    device_growth_bytes: int | None = None
    handle_growth: int | None = None
    """From the end of the warm-up round to the end of the last: resident memory and open files of
    rank 0 and all receivers, and what rank 0's allocator holds."""


def summarise_rounds(rounds: Sequence[SyncRound]) -> dict[str, float]:
    """Return the median of each phase over the steady rounds; of all if none is steady."""
    chosen = [entry for entry in rounds if entry.kind == "steady"] or list(rounds)
    return {name: median(getattr(r, name) for r in chosen) for name in SyncSeconds.model_fields}


def steady_pauses(record: SyncRecord | None) -> list[float]:
    """Return the pauses that count, in their order."""
    if record is None:
        return []
    return [entry.pause_seconds for entry in record.rounds if entry.kind == "steady"]


def name_round(index: int) -> RoundKind:
    """Say what kind the round of this index, from 0, is."""
    return "cold" if index == 0 else "warmup" if index == 1 else "steady"


def share_of_limit(num_bytes: float, seconds: float, limit: float | None) -> float | None:
    """Return the achieved rate as a share of a limit in bytes per second."""
    return num_bytes / seconds / limit if limit and seconds > 0 else None


def share_of_disk_limit(
    record: SyncSeconds, num_bytes: float, write: float | None, read: float | None
) -> float | None:
    """Return the time that plain files would take over that of the version's files."""
    if not write or not read or record.transfer_seconds <= 0:
        return None
    return (num_bytes / write + num_bytes / read) / record.transfer_seconds
