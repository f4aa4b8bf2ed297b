"""Processes that may die in a save. They are forked from one server that has imported torch."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.engine.checkpoint.background import AsyncSaves
from fsdpbench.engine.checkpoint.formats import load_checkpoint, save_checkpoint
from fsdpbench.engine.config.checkpoint import SaveLoadMeta
from fsdpbench.engine.parallel.regions import local_shard
from tests.distributed.payloads.checkpoint_parts import build

WAIT_SECONDS = 60


def start(target: Any, *arguments: Any) -> tuple[Any, Connection]:
    """Run `target(connection, *arguments)` in a process of its own; return both ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def hear(connection: Connection) -> Any:
    assert connection.poll(WAIT_SECONDS), "no word from the saving process"
    return connection.recv()


def build_alone() -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return build("fsdp:d1", "tiny-llama")


def save_in_a_loop(
    connection: Connection, path: str, weight_format: str, num_saves: int | None
) -> None:
    """Load what a dead process left, whose weights must all be its version; save on from there."""
    parts = build_alone()
    meta = SaveLoadMeta(path=path, weight_format=weight_format)
    shards = [local_shard(parameter) for parameter in parts.model.parameters()]
    version = 0
    if any(Path(path).parent.iterdir()):
        version = load_checkpoint(parts, meta)
        assert all(bool((shard == version).all()) for shard in shards)
    connection.send(version)
    counter = itertools.count(version + 1) if num_saves is None else range(1, 1 + num_saves)
    for number in counter:
        for shard in shards:
            shard.fill_(number)
        save_checkpoint(parts, meta, number)
        connection.send(number)


def kill_while_saving(path: Path, weight_format: str, num_kills: int) -> list[tuple[int, int]]:
    """Kill that many savers at seeded moments; return (last version heard, version loaded)."""
    draws = random.Random(f"{weight_format} {num_kills}")
    seen = []
    heard = 0
    for _ in range(num_kills):
        process, connection = start(save_in_a_loop, str(path), weight_format, None)
        loaded = hear(connection)
        seen.append((heard, loaded))
        heard = hear(connection)
        # some time within the two saves that follow; a save takes some 0.1 s
        process.join(draws.random() * 0.2)
        process.kill()
        process.join(WAIT_SECONDS)
        try:
            while connection.poll():
                heard = connection.recv()
        except EOFError:
            pass
    process, connection = start(save_in_a_loop, str(path), weight_format, 1)
    seen.append((heard, hear(connection)))
    hear(connection)
    process.join(WAIT_SECONDS)
    assert process.exitcode == 0
    return seen


def leave_during_a_save(connection: Connection, path: str) -> None:
    """Start a save in the background and end at once."""
    parts = build_alone()
    saves = AsyncSaves()
    saves.save(parts, SaveLoadMeta(path=path, weight_format="dcp", asynchronous=True), 1)
    connection.send(saves.in_flight)
