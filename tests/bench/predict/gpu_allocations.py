"""Carry out recorded allocations on a GPU and print what torch's allocator reserved for them.

Run as a script, alone in its process: reads {"events": [[kind, block, bytes, stream]...],
"limit_bytes": int or null} from stdin and writes one JSON object to stdout. The first stream is the
default one, each further number is a stream of its own. Nothing is launched on any of them.
"""

import json
import sys

import torch


def carry_out(events, limit_bytes):
    torch.cuda.init()
    device = torch.device("cuda", 0)
    total_bytes = torch.cuda.mem_get_info(device)[1]
    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    assert torch.cuda.memory_reserved(device) == 0
    streams = {0: torch.cuda.default_stream(device)}
    live, reserved, addresses, oom = {}, [], {}, None
    for index, (kind, block_id, num_bytes, stream) in enumerate(events):
        if kind == "free":
            del live[block_id]
        else:
            if stream not in streams:
                streams[stream] = torch.cuda.Stream(device)
            try:
                with torch.cuda.stream(streams[stream]):
                    live[block_id] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                oom = index
                break
            addresses[block_id] = live[block_id].data_ptr()
        reserved.append(torch.cuda.memory_reserved(device))
    stats = torch.cuda.memory_stats(device)
    return {
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "num_segments": stats["segment.all.peak"],
        "num_retries": stats["num_alloc_retries"],
        "oom_event_index": oom,
        "reserved_bytes": reserved,
        "addresses": addresses,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    order = json.load(sys.stdin)
    json.dump(carry_out(order["events"], order["limit_bytes"]), sys.stdout)
