"""The file that makes a folder one of our checkpoints: its format, version and files with sizes.

Only a folder with a manifest is ever replaced or removed, and of it only the files listed. Readers
need no manifest: folders of other programs load as well.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from fsdpbench.errors import CheckpointError

MANIFEST_FILE = "fsdpbench.json"
SCHEMA_VERSION = 1
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Manifest:
    """What a finished checkpoint says of itself."""

    weight_format: str
    version: int  # of the weights, as the engine counts
    with_optim: bool
    world_size: int  # ranks that wrote it; random states are of use to as many only
    files: dict[str, int] = field(default_factory=dict)  # path inside the folder -> bytes
    schema_version: int = SCHEMA_VERSION


def list_files(folder: Path) -> dict[str, int]:
    """Map the files of a folder, the manifest aside, to their sizes in bytes."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST_FILE
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder that is complete but for it."""
    text = json.dumps(asdict(manifest), indent=1)
    (folder / MANIFEST_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the folder's manifest; None if it has none. CheckpointError if it makes no sense."""
    file = folder / MANIFEST_FILE
    try:
        manifest = parse_manifest(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UNREADABLE as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{file}: schema_version={manifest.schema_version}; this program knows "
            f"{SCHEMA_VERSION}. Read it with the program that wrote it."
        )
    return manifest


def parse_manifest(content: dict[str, Any]) -> Manifest:
    """Build a manifest; ValueError or its kin if a field is wrong or a name leads elsewhere."""
    said = Manifest(**content)
    for name in said.files:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name or name == MANIFEST_FILE:
            raise ValueError(f"it names a file elsewhere: {name!r}")
    return Manifest(
        weight_format=str(said.weight_format),
        version=int(said.version),
        with_optim=bool(said.with_optim),
        world_size=int(said.world_size),
        files={str(PurePosixPath(name)): int(size) for name, size in said.files.items()},
        schema_version=int(said.schema_version),
    )


def is_intact(folder: Path) -> bool:
    """Tell whether every file that the manifest lists is there, as large as it says."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    if manifest is None:
        return False
    found = list_files(folder)
    return all(found.get(name) == size for name, size in manifest.files.items())
