"""Sharded checkpoints saved and loaded by real ranks."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdpbench.engine.checkpoint.background import AsyncSaves
from fsdpbench.engine.checkpoint.formats import load_checkpoint, save_checkpoint
from fsdpbench.engine.checkpoint.state import DCPState
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.device import Device
from fsdpbench.engine.parallel.regions import local_shard
from fsdpbench.errors import FsdpbenchError
from tests.distributed.payloads.checkpoint_parts import build, fingerprint, step

VERSION = 7


def dcp(folder: str, **fields: Any) -> SaveLoadMeta:
    return SaveLoadMeta(path=folder, weight_format="dcp", **{"with_optim": True, **fields})


def save(rank: int, world_size: int, folder: str, backend: str, **fields: Any) -> Any:
    """Two steps, then a save; returns the state and what the generator draws next."""
    parts = build(backend, **fields)
    for number in range(2):
        step(parts, number)
    torch.manual_seed(100 + rank)
    save_checkpoint(parts, dcp(folder), VERSION)
    return {**fingerprint(parts), "draw": torch.rand(2).tolist()}


def load(rank: int, world_size: int, folder: str, backend: str, **fields: Any) -> Any:
    """Load into an engine of other weights that made a step of its own."""
    parts = build(backend, seed=11, **fields)
    step(parts, 5)
    version = load_checkpoint(parts, dcp(folder))
    draw = torch.rand(2).tolist()
    return {**fingerprint(parts), "draw": draw, "version": version}


def resume(rank: int, world_size: int, folder: str) -> list[dict[str, str]]:
    """The run that went on, and the one that was loaded before its first step and went on."""
    states = []
    parts = build("fsdp:d2")
    save_checkpoint(parts, dcp(folder), 0)  # no step yet: the save must not count as one
    for number in range(2):
        step(parts, number)
    states.append(fingerprint(parts))
    parts = build("fsdp:d2", seed=12)
    load_checkpoint(parts, dcp(folder))
    for number in range(2):
        step(parts, number)
    states.append(fingerprint(parts))
    return states


def save_in_background(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Steps go on during a save; a second one waits; an error comes out at the next call."""
    parts = build("fsdp:d2", fsdp={"offload_params": True})  # shards that steps change in place
    saves = AsyncSaves()
    step(parts, 0)
    saved = [fingerprint(parts)]
    saves.save(parts, dcp(f"{folder}/first", asynchronous=True), 1)
    step(parts, 1)
    saved.append(fingerprint(parts))
    saves.save(parts, dcp(f"{folder}/second", asynchronous=True), 2)
    first_is_there = (Path(folder) / "first" / ".metadata").is_file()
    step(parts, 2)
    saves.wait()
    blocker = Path(folder) / "third"
    if rank == 0:
        blocker.mkdir()
        (blocker / "notes.txt").touch()
    saves.save(parts, dcp(str(blocker), asynchronous=True), 3)
    said = error_of(saves.wait)
    saves.save(parts, dcp(f"{folder}/fourth"), 4)  # the error was said; this one is as usual
    saves.close()
    saves.close()
    loaded = []
    for name in ("first", "second"):
        load_checkpoint(parts, dcp(f"{folder}/{name}"))
        loaded.append(fingerprint(parts))
    return {"saved": saved, "loaded": loaded, "error": said, "first_is_there": first_is_there}


def error_of(call: Any, *arguments: Any) -> tuple[str, str]:
    try:
        call(*arguments)
    except (FsdpbenchError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def fail_to_write(rank: int, world_size: int, folder: str, weight_format: str) -> dict[str, Any]:
    """Save; save again while the last rank's files may not grow; load what is there."""
    parts = build("fsdp:d2")
    meta = SaveLoadMeta(path=folder, weight_format=weight_format, with_optim=True)
    save_checkpoint(parts, meta, 1)
    before = fingerprint(parts)
    step(parts, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        said = error_of(save_checkpoint, parts, meta, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    version = load_checkpoint(parts, meta)
    same = fingerprint(parts)["weights"] == before["weights"]
    left = sorted(path.name for path in Path(folder).parent.glob(".*"))
    return {"error": said, "version": version, "same": same, "left": left}


def refuse(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What loads of unsuitable checkpoints say, and that they change nothing."""
    parts = build("fsdp:d2")
    step(parts, 0)
    save_checkpoint(parts, dcp(f"{folder}/weights", with_optim=False), 1)
    save_checkpoint(parts, SaveLoadMeta(path=f"{folder}/hf"), 1)
    before = fingerprint(parts)
    other = build("fsdp:d2", path="tiny-llama")
    sgd = build("fsdp:d2", optimizer={"type": "sgd", "lr": 0.1})
    save_checkpoint(sgd, dcp(f"{folder}/sgd"), 1)
    said = {
        "no optimizer": error_of(load_checkpoint, parts, dcp(f"{folder}/weights")),
        "other model": error_of(load_checkpoint, other, dcp(f"{folder}/weights", with_optim=False)),
        "other optimizer": error_of(load_checkpoint, parts, dcp(f"{folder}/sgd")),
        "no optimizer, no states": error_of(load_checkpoint, sgd, dcp(f"{folder}/weights")),
        "other format": error_of(load_checkpoint, parts, dcp(f"{folder}/hf")),
        "no optimizer in hf": error_of(
            load_checkpoint, parts, SaveLoadMeta(path=f"{folder}/hf", with_optim=True)
        ),
    }
    assert load_checkpoint(sgd, dcp(f"{folder}/sgd")) == 1
    assert fingerprint(parts) == before
    return said


def fail_to_collect(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Saves and loads during which rank 1 has no memory for the state."""
    parts = build("fsdp:d2")
    formats = ("dcp", "hf")
    metas = {
        f: SaveLoadMeta(path=f"{folder}/{f}", weight_format=f, with_optim=True) for f in formats
    }
    for meta in metas.values():
        save_checkpoint(parts, meta, 1)
    before = fingerprint(parts)
    names = ("state_dict", "load_state_dict")
    kept = {name: getattr(DCPState, name) for name in names}
    said = {}

    def refuse(*_: Any) -> None:
        raise RuntimeError("no memory")

    for weight_format, meta in metas.items():
        for name, call in (
            ("state_dict", partial(save_checkpoint, parts, meta, 2)),
            ("state_dict", partial(load_checkpoint, parts, meta)),
            ("load_state_dict", partial(load_checkpoint, parts, meta)),
        ):
            if rank == 1:
                setattr(DCPState, name, refuse)
            said[f"{weight_format} {call.func.__name__} {name}"] = error_of(call)
            setattr(DCPState, name, kept[name])
    return {"said": said, "same": fingerprint(parts) == before}


def forget_rounding(rank: int, world_size: int, folder: str) -> bool:
    """Load weights alone into an engine that remembers the rounding of others."""
    adam = {"type": "adam_bf16", "lr": 1e-2}
    parts = build("fsdp:d2", optimizer=adam, optimizer_dtype="bfloat16", dtype="bfloat16")
    step(parts, 0)
    save_checkpoint(parts, dcp(folder, with_optim=False), 1)
    states = [state["compensation"] for state in parts.optimizer.state.values()]
    remembered = any(bool(local_shard(state).any()) for state in states)
    load_checkpoint(parts, dcp(folder, with_optim=False))
    return remembered and not any(bool(local_shard(state).any()) for state in states)


def save_and_load_on_gpus(
    rank: int, world_size: int, folder: str, weight_format: str, **fields: Any
) -> dict[str, Any]:
    """Save, in the background if the format can, step on, load; states and the device's draws."""
    device = Device("cuda", rank)
    parts = build(f"fsdp:d{world_size}", device=device, **fields)
    meta = SaveLoadMeta(
        path=folder,
        weight_format=weight_format,
        with_optim=True,
        asynchronous=weight_format == "dcp",
    )
    step(parts, 0)
    saved = fingerprint(parts)
    saves = AsyncSaves()
    saves.save(parts, meta, VERSION)
    drawn = torch.rand(2, device=device.torch_device).tolist()
    step(parts, 1)
    changed = fingerprint(parts)
    saves.close()
    version = load_checkpoint(parts, meta)
    drawn_again = torch.rand(2, device=device.torch_device).tolist()
    loaded = fingerprint(parts)
    return {
        "states": (saved, loaded),
        "changed": changed != saved,
        "version": version,
        "draws": (drawn, drawn_again),
    }


def run_sample(rank: int, world_size: int, code: str, folder: str) -> list[str]:
    exec(compile(code, "sample", "exec"), {"folder": folder})
    return sorted(path.name for path in Path(folder).iterdir())
