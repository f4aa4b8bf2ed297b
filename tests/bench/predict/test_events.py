from fsdpbench.bench.predict.events import MemoryEvent


def test_an_event_is_a_plain_tuple():
    event = MemoryEvent("alloc", block_id=7, num_bytes=512, stream=0)
    assert event == ("alloc", 7, 512, 0)
