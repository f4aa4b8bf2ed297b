"""Checksums of tensors, computed where they lie: equal for equal bytes on every kind of device.

The 16-bit words of a tensor stand in rows of a fixed length. Three sums modulo 2**64 make the
digest: of all words, of each row's sum times the row's number, and of each column's sum times the
column's number. One changed word, exchanged words, shifted or missing parts change at least one of
them. It guards against accidents, not against forgery. No copy of a whole tensor is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fsdpbench.errors import WeightSyncError, list_names

ROW_WORDS = 4096
CHUNK_ROWS = {"cpu": 64}  # words of a chunk become int64; a chunk should stay in the cache
DEVICE_CHUNK_ROWS = 4096  # 128 MiB as int64
MASK = (1 << 64) - 1


class DigestSums:
    """Digests of tensors that come one at a time; nothing waits for a device before `collect`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._heads: list[str] = []
        self._sums: list[torch.Tensor] = []  # [3] int64 each

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Sum a tensor up where it lies; one that is not contiguous is copied first."""
        self._names.append(name)
        self._heads.append(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        self._sums.append(sum_words(tensor))

    def collect(self) -> dict[str, str]:
        """Map the names to digests of dtype, shape and bytes; waits for each device once."""
        digests = {}
        for name, head, values in zip(self._names, self._heads, _fetch(self._sums), strict=True):
            digests[name] = f"{head}:{''.join(f'{value & MASK:016x}' for value in values)}"
        return digests


def compute_digests(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Map names to digests of tensors that may lie anywhere; waits for each device once."""
    sums = DigestSums()
    for name, tensor in named_tensors:
        sums.add(name, tensor)
    return sums.collect()


def compute_digest(tensor: torch.Tensor) -> str:
    """Return the digest of one tensor; waits for its device."""
    return compute_digests([("", tensor)])[""]


def compare_digests(sent: Mapping[str, str], arrived: Mapping[str, str], receiver: str) -> None:
    """Raise WeightSyncError unless the receiver holds exactly what was sent; names five tensors."""
    problems = []
    if missing := [name for name in sent if name not in arrived]:
        problems.append(f"missing there: {list_names(missing)}")
    if unexpected := [name for name in arrived if name not in sent]:
        problems.append(f"never sent: {list_names(unexpected)}")
    common = [name for name in sent if name in arrived]
    recast = {name: None for name in common if _head(sent[name]) != _head(arrived[name])}
    if recast:
        first = next(iter(recast))
        problems.append(
            f"other shape or dtype: {list_names(recast)} ({first} is {_head(sent[first])} here and "
            f"{_head(arrived[first])} there; the engine's dtype must be wire_dtype)"
        )
    if differing := [name for name in common if name not in recast and sent[name] != arrived[name]]:
        problems.append(f"other values: {list_names(differing)}")
    if problems:
        raise WeightSyncError(
            f"{receiver} does not hold the weights that were sent: {'; '.join(problems)}. Nothing "
            "it generates now can be trusted; check that it runs the same model and that nothing "
            "else writes its weights."
        )


def _head(digest: str) -> str:
    """Return dtype and shape of a digest."""
    return digest.partition(":")[0]


@torch.no_grad()
def sum_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the three sums [3], int64, on the tensor's device, without waiting for it."""
    flat = tensor.detach().contiguous().view(-1).view(torch.int16)
    device = flat.device
    totals = torch.zeros(3, dtype=torch.int64, device=device)
    columns = torch.arange(1, ROW_WORDS + 1, device=device)
    num_rows = flat.numel() // ROW_WORDS
    rows = flat[: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS)
    chunk_rows = CHUNK_ROWS.get(device.type, DEVICE_CHUNK_ROWS)
    for first in range(0, num_rows, chunk_rows):
        _add_rows(totals, rows[first : first + chunk_rows], first, columns)
    rest = flat[num_rows * ROW_WORDS :]
    if rest.numel():
        _add_rows(totals, rest[None], num_rows, columns[: rest.numel()])
    return totals


def _add_rows(totals: torch.Tensor, rows: torch.Tensor, first: int, columns: torch.Tensor) -> None:
    wide = rows.to(torch.int64)  # [r, c]
    row_sums, column_sums = wide.sum(1), wide.sum(0)
    numbers = torch.arange(first + 1, first + 1 + rows.shape[0], device=rows.device)
    totals[0] += row_sums.sum()
    totals[1] += (row_sums * numbers).sum()
    totals[2] += (column_sums * columns).sum()


def _fetch(sums: list[torch.Tensor]) -> list[list[int]]:
    """Bring all sums to the host, one copy a device, in their order."""
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(sums):
        by_device.setdefault(one.device, []).append(index)
    fetched: list[list[int]] = [[] for _ in sums]
    for indices in by_device.values():
        rows = torch.stack([sums[index] for index in indices]).tolist()
        for index, values in zip(indices, rows, strict=True):
            fetched[index] = values
    return fetched
