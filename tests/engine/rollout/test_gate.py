from __future__ import annotations

import asyncio

import pytest

from fsdpbench.engine.rollout.gate import RecalledError, RequestGate
from fsdpbench.errors import WeightSyncError


async def answer_when(event, value):
    await event.wait()
    return value


def test_open_gate_carries():
    async def main():
        gate, event = RequestGate(), asyncio.Event()
        event.set()
        await gate.wait_open(1)
        return await gate.carry(answer_when(event, 7))

    assert asyncio.run(main()) == 7


def test_shut_gate_lets_nothing_pass_until_the_time_is_up():
    async def main():
        gate = RequestGate()
        gate.shut()
        await gate.wait_open(0.01)

    with pytest.raises(WeightSyncError, match="continue_generation"):
        asyncio.run(main())


def test_recall_takes_back_what_is_under_way():
    async def main():
        gate = RequestGate()
        carried = asyncio.ensure_future(gate.carry(answer_when(asyncio.Event(), 7)))
        await asyncio.sleep(0)
        assert not await gate.settle(0.01)
        assert gate.num_requests == 1
        await gate.recall()
        with pytest.raises(RecalledError):
            await carried
        assert await gate.settle(0.01)

    asyncio.run(main())


def test_cancelling_the_carrier_is_no_recall():
    async def main():
        gate = RequestGate()
        carried = asyncio.ensure_future(gate.carry(answer_when(asyncio.Event(), 7)))
        await asyncio.sleep(0)
        carried.cancel()
        with pytest.raises(asyncio.CancelledError):
            await carried
        assert await gate.settle(0.01)

    asyncio.run(main())
