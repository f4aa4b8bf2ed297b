from __future__ import annotations

import socket
import threading
import time

import pytest

from fsdpbench.engine.rollout.channel import ServerChannel
from fsdpbench.engine.rollout.dialects import RefusalError, ServerCall
from fsdpbench.errors import WorkerError

CALL = ServerCall("/v1/models", method="GET")


@pytest.fixture
def open_channel():
    opened = []

    def open_once(url, timeout_seconds=5.0, token=None):
        opened.append(ServerChannel(url, "vllm server", token, timeout_seconds))
        return opened[-1]

    yield open_once
    for channel in opened:
        channel.close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b'{"error":{"message":"EngineCore died","code":500}}', "status 500: EngineCore died"),
        (400, b'{"message":"no room"}', "status 400: no room"),
        (400, b'{"object":"error","detail":"bad"}', "status 400: bad"),
        (401, b'{"error":"Unauthorized"}', r"401 \(Unauthorized\).*API key as the token"),
        (403, b'{"error":{"message":"disabled"}}', "disabled"),
        (404, b'{"detail":"Not Found"}', "VLLM_SERVER_DEV_MODE=1"),
        (502, b"<html>\x1b[31mgate</html>", r"status 502: <html> \[31mgate</html>"),
        (500, b"x" * 5000, r"x{300}\.\.\.$"),
    ],
)
def test_refusals_are_quoted(stub, open_channel, status, body, message):
    stub.overrides["/v1/models"] = (status, body, 0.0)
    channel = open_channel(stub.url)
    with pytest.raises(RefusalError, match=message):
        channel.run(channel.ask(CALL))


@pytest.mark.parametrize("body", [b"<html>hello", b"{", b"\xff\xfe"])
def test_garbage_is_named(stub, open_channel, body):
    stub.overrides["/v1/models"] = (200, body, 0.0)
    channel = open_channel(stub.url)
    with pytest.raises(WorkerError, match="is no JSON"):
        channel.run(channel.ask(CALL))


def test_optional_paths_may_be_missing(stub, open_channel):
    channel = open_channel(stub.url)
    stub.missing.add("/weight_info")
    assert channel.run(channel.ask(ServerCall("/weight_info", is_optional=True))) is None
    stub.overrides["/weight_info"] = (500, b"", 0.0)
    stub.missing.clear()
    with pytest.raises(RefusalError):
        channel.run(channel.ask(ServerCall("/weight_info", is_optional=True)))


def test_token_travels_and_is_never_shown(stub, open_channel):
    stub.token = "s3cret"
    channel = open_channel(stub.url, token="s3cret")
    assert channel.run(channel.ask(CALL))["object"] == "list"
    wrong = open_channel(stub.url, token="wr0ng")
    with pytest.raises(RefusalError, match="401") as caught:
        wrong.run(wrong.ask(CALL))
    assert "wr0ng" not in str(caught.value)


def test_silence_ends_at_the_deadline(stub, open_channel):
    stub.overrides["/v1/models"] = (200, b"{}", 20.0)
    channel = open_channel(stub.url, timeout_seconds=0.2)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"no whole answer within 0\.2 s"):
        channel.run(channel.ask(CALL))
    assert time.monotonic() - begin < 5


def serve_bytes(listener, chunks, stopped, pause_seconds):
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        for chunk in chunks:
            if stopped.wait(pause_seconds):
                return
            try:
                connection.sendall(chunk)
            except OSError:
                return


@pytest.fixture
def raw_server():
    """Return a function that serves one connection with bytes as they are, slowly."""
    stopped, threads = threading.Event(), []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(chunks, pause_seconds=0.0):
        arguments = (listener, chunks, stopped, pause_seconds)
        threads.append(threading.Thread(target=serve_bytes, args=arguments))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    stopped.set()
    for thread in threads:
        thread.join(10)
    listener.close()


def test_trickling_answer_ends_at_the_deadline(raw_server, open_channel):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    url = raw_server([head, *[b" "] * 1000], pause_seconds=0.05)
    channel = open_channel(url, timeout_seconds=0.4)
    with pytest.raises(WorkerError, match="no whole answer"):
        channel.run(channel.ask(CALL))


@pytest.mark.parametrize(
    "chunks",
    [[b"SSH-2.0-OpenSSH\r\n"], [], [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"]],
    ids=["no HTTP", "nothing", "cut off"],
)
def test_broken_connections_are_named(raw_server, open_channel, chunks):
    channel = open_channel(raw_server(chunks))
    with pytest.raises(WorkerError, match="cannot be reached or broke off"):
        channel.run(channel.ask(CALL))


def test_refused_connection_is_named(open_channel):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    channel = open_channel(f"http://127.0.0.1:{port}")
    with pytest.raises(WorkerError, match="Does it run"):
        channel.run(channel.ask(CALL))


def test_close_ends_calls(stub, open_channel):
    stub.overrides["/v1/models"] = (200, b"{}", 20.0)
    channel = open_channel(stub.url)
    future = channel.submit(channel.ask(CALL))
    while not stub.seen:
        assert not future.done()
    channel.close()
    with pytest.raises(WorkerError, match="was closed"):
        future.result(10)
    with pytest.raises(WorkerError, match="was closed"):
        channel.run(channel.ask(CALL))
    channel.close()
