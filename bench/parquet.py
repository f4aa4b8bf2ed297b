"""Records as one flat Parquet table: a column for each plain field, axis, phase and fact.

The only module of bench that imports pyarrow; JSON Lines remain the truth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpbench.bench.records import Record
from fsdpbench.bench.store import StoreError

SPREAD = ("axes", "phases", "environment", "sync")
"""Fields whose keys become columns `field.key`."""
AS_JSON = ("config", "workload", "verdict", "command")
"""Fields kept as JSON text."""


def flatten_record(record: Record) -> dict[str, Any]:
    """Return the record as one row; lists of numbers stay lists."""
    row: dict[str, Any] = {}
    for name, value in record.model_dump(mode="python", by_alias=True).items():
        if name in SPREAD:
            row.update({f"{name}.{key}": _to_scalar(item) for key, item in (value or {}).items()})
        elif name in AS_JSON:
            row[name] = None if value is None else json.dumps(value, default=str)
        else:
            row[name] = value
    row["status"] = record.status.value
    return row


def _to_scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value, default=str)


def save_parquet(records: Sequence[Record], path: Path) -> None:
    """Write the records as a Parquet file, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [flatten_record(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _unify([row.get(name) for row in rows]) for name in names}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(pa.table(columns), temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error


def _unify(values: list[Any]) -> list[Any]:
    """Give a column one type: values of several kinds (an axis of 1 and "auto") become text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 or kinds == {int, float}:
        return [float(v) if kinds == {int, float} and v is not None else v for v in values]
    return [None if value is None else json.dumps(value) for value in values]
