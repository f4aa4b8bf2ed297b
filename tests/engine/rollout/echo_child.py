"""A child without torch: answers, errs, hangs or dies as it is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from fsdpbench.engine.rollout.frames import FrameDecoder, encode_frame


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    decoder = FrameDecoder()
    while received := connection.recv(1 << 16):
        for message in decoder.feed(received):
            answer(connection, message)


def answer(connection: socket.socket, message: dict) -> None:
    call, arguments = message["call"], message["arguments"]
    reply = {"id": message["id"], "result": arguments.get("value")}
    if call == "fail":
        reply = {"id": message["id"], "error": "WeightSyncError", "text": "as told"}
    elif call == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(arguments["code"])
    elif call == "hang":
        return
    elif call == "stop_reading":
        connection.sendall(encode_frame(reply))
        threading.Event().wait()
    elif call == "environment":
        reply["result"] = dict(os.environ)
    elif call == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        reply["result"] = child.pid
    elif call == "garble":
        connection.sendall(b"\xff" * 64)
        return
    connection.sendall(encode_frame(reply))


if __name__ == "__main__":
    main()
