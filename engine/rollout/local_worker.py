"""The process of a local rollout engine: `python -m fsdpbench.engine.rollout.local_worker FD`.

FD is its end of a socket pair, which nobody else can reach. The parent's end closes when the parent
ends; then this process ends, too, wherever its threads are.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from fsdpbench.engine.rollout.frames import FrameDecoder, encode_frame
from fsdpbench.engine.rollout.local_service import LocalService

PARENT_POLL_SECONDS = 2.0  # how soon a dead parent shows whose end of the pair a fork still holds
CHUNK_BYTES = 1 << 16


class Wire:
    """This process's end of the pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # two threads answer

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a whole message; without a parent the process ends."""
        try:
            with self._lock:
                self._connection.sendall(encode_frame(message))
        except OSError:
            os._exit(0)

    def read_until_closed(self, service: LocalService, parent: int) -> None:
        """Hand messages to the service; end the process when the parent is gone.

        At once and without clean-up, since the main thread may be in a collective for good.
        """
        code = 1
        try:
            self._read(service, parent)
            code = 0
        except OSError:  # a parent that dies with answers unread resets the connection
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)

    def _read(self, service: LocalService, parent: int) -> None:
        decoder = FrameDecoder()
        poller = select.poll()  # the parent may have had a thousand descriptors: select takes none
        poller.register(self._connection, select.POLLIN)
        while os.getppid() == parent:
            if not poller.poll(PARENT_POLL_SECONDS * 1000):
                continue
            received = self._connection.recv(CHUNK_BYTES)
            if not received:
                return
            for message in decoder.feed(received):
                service.receive(message)


def main() -> None:
    """Serve the socket that the command line names, to the end of the parent."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    wire = Wire(socket.socket(fileno=descriptor))
    service = LocalService(wire.send)
    threading.Thread(
        target=wire.read_until_closed, args=(service, parent), name="messages", daemon=True
    ).start()
    service.run()


if __name__ == "__main__":
    main()
