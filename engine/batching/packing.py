"""From padded CPU batches [B, L] to packed rows [T]. Pure; no device and no process group.

Alignment: `labels[t]` is the next token of the same sequence, or -100 at its last token and on
padding. Padding is a sequence of its own (positions from 0, token id 0, every other tensor 0), so
that no attention crosses from it into a real sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fsdpbench.engine.batching.containers import IGNORED_LABEL, PackedMicroBatch
from fsdpbench.errors import ConfigError, Violation, list_names

Batch = Mapping[str, torch.Tensor]

DERIVED_TOKENS = ("labels", "position_ids")  # made here, hence not accepted from a batch


def read_lengths(batch: Batch) -> list[int]:
    """Return the number of real tokens of each row; refuse a batch that cannot be packed.

    Wants `input_ids` [B, L] and a right-padded `attention_mask` [B, L], and all tensors on the CPU
    with B rows.
    """
    violations = _find_shape_violations(batch)
    if violations:
        raise ConfigError(violations)
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(dim=1)
    positions = torch.arange(mask.shape[1])
    ragged = (mask != (positions < lengths[:, None])).any(dim=1)
    rules = (
        (lengths == 0, "no real token", "every sequence needs one token; drop the row"),
        (ragged, "padding before a token", "must be right-padded; move the tokens to the left"),
    )
    for broken, found, remedy in rules:
        if broken.any():
            rows = list_names(str(row) for row in broken.nonzero().flatten().tolist())
            violations.append(Violation(f"batch.attention_mask[rows {rows}]", found, remedy))
    if violations:
        raise ConfigError(violations)
    return lengths.tolist()


def check_token_ids(batch: Batch, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary in the real tokens of a batch that can be packed.

    A sharded embedding answers such an id with zeros and a sharded head with a wrong probability.
    """
    ids = batch["input_ids"]
    outside = ((ids < 0) | (ids >= vocab_size)) & batch["attention_mask"].bool()
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        where = f"batch.input_ids[{row}, {column}]"
        allowed = f"must lie in 0..{vocab_size - 1}, the model's vocabulary"
        remedy = "check that the tokenizer belongs to the model"
        raise ConfigError([Violation(where, str(int(ids[row, column])), allowed, remedy)])


def _find_shape_violations(batch: Batch) -> list[Violation]:
    missing = [name for name in ("input_ids", "attention_mask") if name not in batch]
    if missing:
        return [
            Violation(f"batch.{name}", "missing", "must be a [B, L] tensor") for name in missing
        ]
    violations = []
    shape = batch["input_ids"].shape
    if len(shape) != 2:
        violations.append(Violation("batch.input_ids", str(list(shape)), "must be [B, L]"))
        return violations
    if batch["attention_mask"].shape != shape:
        found = str(list(batch["attention_mask"].shape))
        violations.append(
            Violation("batch.attention_mask", found, f"must be {list(shape)} as input_ids is")
        )
    for name, tensor in batch.items():
        if name in DERIVED_TOKENS:
            remedy = "leave it out; packing derives it (weight tokens by loss_mask)"
            violations.append(Violation(f"batch.{name}", "given", remedy))
        if tensor.device.type != "cpu":
            remedy = "must be on the CPU: planning reads lengths on the host"
            violations.append(Violation(f"batch.{name}", str(tensor.device), remedy))
        if tensor.dim() == 0 or tensor.shape[0] != shape[0]:
            remedy = f"must have {shape[0]} rows as input_ids has"
            violations.append(Violation(f"batch.{name}", str(list(tensor.shape)), remedy))
    return violations


def pack(
    batch: Batch, indices: Sequence[int], pad_multiple: int = 1, pad_to: int = 0
) -> PackedMicroBatch:
    """Pack the rows `indices` of a batch that `read_lengths` accepts, in that order.

    The packed length is a multiple of `pad_multiple`, at least `pad_to`, and at least one token: no
    rows make a dummy. Tensors [B, L, ...] become per-token [T, ...]; all others stay per sequence.
    """
    rows = list(indices)
    lengths = batch["attention_mask"][rows].bool().sum(dim=1).tolist()
    num_real = sum(lengths)
    num_tokens = -(-max(num_real, pad_to, 1) // pad_multiple) * pad_multiple
    padding = num_tokens - num_real
    segments = [*lengths, padding] if padding else lengths
    width = batch["input_ids"].shape[1]
    tokens: dict[str, torch.Tensor] = {}
    per_sequence: dict[str, torch.Tensor] = {}
    for name, tensor in batch.items():
        if name == "attention_mask":
            continue
        if tensor.dim() > 1 and tensor.shape[1] == width:
            slices = [tensor[row, :length] for row, length in zip(rows, lengths, strict=True)]
            tokens[name] = torch.cat([*slices, tensor.new_zeros((padding, *tensor.shape[2:]))])
        else:
            per_sequence[name] = tensor[rows]
    cu_seqlens = torch.tensor([0, *segments]).cumsum(0)
    tokens["position_ids"] = torch.cat([torch.arange(length) for length in segments])
    tokens["labels"] = _shift_labels(tokens["input_ids"], cu_seqlens, num_real)
    return PackedMicroBatch(
        tokens=tokens,
        per_sequence=per_sequence,
        cu_seqlens=cu_seqlens.to(torch.int32),
        sequence_lengths=tuple(lengths),
        sequence_indices=tuple(rows),
        max_seqlen=max(segments),
        num_tokens=num_tokens,
        num_real_tokens=num_real,
    )


def _shift_labels(input_ids: torch.Tensor, cu_seqlens: torch.Tensor, num_real: int) -> torch.Tensor:
    labels = torch.roll(input_ids, -1)
    labels[cu_seqlens[1:] - 1] = IGNORED_LABEL
    labels[num_real:] = IGNORED_LABEL
    return labels
