"""Which style each module of a family gets under tensor parallelism: data, derived from its row.

Between the blocks the sequence is sharded over the axis; inside attention and MLP the heads and the
hidden channels are. The embedding and the head are cut along the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpbench.engine.models.families import Family


class TensorStyle(Enum):
    """How a module takes part; `tensor` translates each to a torch style."""

    VOCABULARY_IN = "embedding rows cut over the vocabulary, output scattered over the sequence"
    VOCABULARY_OUT = "head rows cut over the vocabulary"
    SEQUENCE = "parameters whole, tokens sharded"
    HEADS = "parameters whole, heads sharded"
    GATHER = "input gathered over the sequence"
    COLUMN = "output channels sharded"
    ROW = "input channels sharded, output scattered over the sequence"


def plan_model(family: Family) -> Mapping[str, TensorStyle]:
    """Return styles by path for the modules outside the layers."""
    return {
        family.embedding: TensorStyle.VOCABULARY_IN,
        family.final_norm: TensorStyle.SEQUENCE,
        family.head: TensorStyle.VOCABULARY_OUT,
    }


def plan_layer(family: Family) -> Mapping[str, TensorStyle]:
    """Return styles by path below one layer."""
    blocks = dict.fromkeys(path.rpartition(".")[0] for path in family.column_parallel)
    return {
        **dict.fromkeys(family.layer_norms, TensorStyle.SEQUENCE),
        **dict.fromkeys(blocks, TensorStyle.GATHER),
        **dict.fromkeys(family.column_parallel, TensorStyle.COLUMN),
        **dict.fromkeys(family.row_parallel, TensorStyle.ROW),
        **dict.fromkeys(family.query_key_norms, TensorStyle.HEADS),
    }
