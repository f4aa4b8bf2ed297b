"""A small HTTP server of our own that answers as vLLM 0.32.0 and SGLang 0.5.23 do.

vLLM's answers are recorded from the real server, shortened; SGLang's follow its source. What a test
wants otherwise it puts into `overrides`: path -> (status, body, seconds before the answer).
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

WAIT_SECONDS = 30.0
VLLM_SERVER_INFO = {
    "vllm_config": {
        "model_config": {"model": "/models/old", "logprobs_mode": "processed_logprobs"},
        "device_config": {"device": "cuda"},
        "weight_transfer_config": {"backend": "nccl"},
    }
}
UNAUTHORIZED = (401, b'{"error":"Unauthorized"}')
NOT_FOUND = (404, b'{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}')


@dataclass(frozen=True)
class SeenRequest:
    method: str
    path: str
    query: dict[str, str]
    body: Any


@dataclass
class StubServer:
    """What the server knows; tests read and change it between requests."""

    url: str = ""
    token: str | None = None
    label: str = "default"
    folder: str = "/models/old"
    server_info: dict[str, Any] = field(default_factory=lambda: VLLM_SERVER_INFO)
    overrides: dict[str, tuple[int, bytes, float]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    seen: list[SeenRequest] = field(default_factory=list)
    num_before_abort: int | None = None  # tokens of a generation that then waits for a pause
    delay_seconds: float = 0.0  # before a generation is answered
    num_queued: int = 0  # generations that are never answered
    paused: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    generating: threading.Event = field(default_factory=threading.Event)

    def paths(self) -> list[str]:
        """Return the POSTed paths in order."""
        return [request.path for request in self.seen if request.method == "POST"]

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies that a path got."""
        return [request.body for request in self.seen if request.path == path]

    def answer(self, request: SeenRequest) -> tuple[int, bytes]:
        """Return status and body."""
        path, body = request.path, request.body
        if path in self.missing:
            return NOT_FOUND
        if path in ("/pause", "/pause_generation"):
            self.paused.set()
        if path in ("/resume", "/continue_generation"):
            self.paused.clear()
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path in self.overrides:
            status, content, seconds = self.overrides[path]
            self.stopped.wait(seconds)
            return status, content
        if path == "/flush_cache":
            return 200, b"Cache flushed.\nPlease check backend logs for more details."
        if path == "/reset_prefix_cache":
            return 200, b""
        return 200, json.dumps(self._values(path, body)).encode()

    def _values(self, path: str, body: Any) -> Any:
        plain = {
            "/v1/models": {"object": "list", "data": [{"id": "policy", "root": self.folder}]},
            "/get_world_size": {"world_size": 2},
            "/weight_info": {"weight_version": self.label},
            "/model_info": {"model_path": self.folder, "weight_version": self.label},
            "/server_info": self.server_info,
            "/pause": {"status": "paused"},
            "/resume": {"status": "resumed"},
            "/collective_rpc": {"results": [None]},
        }
        if path in plain:
            return plain[path]
        if path == "/v1/completions":
            return {"id": "cmpl-1", "choices": [self._choice(body)]}
        if path == "/generate":
            return self._generation(body)
        return {"success": True, "message": "Success"}

    def _continue(self, num_asked: int) -> tuple[int, str]:
        """Return how many tokens are generated, and why no more."""
        if self.num_queued:
            self.num_queued -= 1
            self.generating.set()
            self.stopped.wait(WAIT_SECONDS)
            return 0, "abort"
        if self.num_before_abort is None:
            self.stopped.wait(self.delay_seconds)
            return num_asked, "length"
        num_tokens, self.num_before_abort = self.num_before_abort, None
        self.generating.set()
        self.paused.wait(WAIT_SECONDS)
        return num_tokens, "abort"

    def _choice(self, body: Any) -> dict[str, Any]:
        num_tokens, reason = self._continue(body["max_tokens"])
        # the token is the sequence's length: a test sees where it stands
        tokens = [len(body["prompt"]) + step for step in range(num_tokens)]
        prompt_logprobs = None
        if "prompt_logprobs" in body:
            entries = [
                {str(token): {"logprob": -token / 100, "rank": 1, "decoded_token": None}}
                for token in body["prompt"][1:]
            ]
            prompt_logprobs = [None, *entries]
        return {
            "index": 0,
            "text": "",
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": [-token / 10 for token in tokens],
            },
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": tokens,
            "prompt_logprobs": prompt_logprobs,
        }

    def _generation(self, body: Any) -> dict[str, Any]:
        num_tokens, reason = self._continue(body["sampling_params"]["max_new_tokens"])
        ids = body["input_ids"]
        tokens = [len(ids) + step for step in range(num_tokens)]
        meta: dict[str, Any] = {"finish_reason": {"type": reason}, "weight_version": self.label}
        if tokens:
            meta["output_token_logprobs"] = [[-token / 10, token, None] for token in tokens]
        if body.get("logprob_start_len") == 0:
            values = [None, *(-token / 100 for token in ids[1:])]
            meta["input_token_logprobs"] = [
                [value, token, None] for value, token in zip(values, ids, strict=True)
            ]
        return {"text": "", "output_ids": tokens, "meta_info": meta}


def write_weights(folder: Path, shapes: dict[str, list[int]], **config: Any) -> str:
    """Write a folder of bf16 zeros without any library."""
    end, header = 0, {}
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def start_stub(stub: StubServer) -> ThreadingHTTPServer:
    """Serve the stub on a free port; `server_close` after `shutdown` ends it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._serve("GET")

        def do_POST(self):
            self._serve("POST")

        def log_message(self, *_arguments):
            pass

        def _serve(self, method):
            parts = urlsplit(self.path)
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            body = json.loads(content) if content else None
            request = SeenRequest(method, parts.path, query, body)
            stub.seen.append(request)
            allowed = stub.token is None or (
                self.headers.get("Authorization") == f"Bearer {stub.token}"
            )
            status, answer = stub.answer(request) if allowed else UNAUTHORIZED
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                self.close_connection = True  # the client has left

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    return server
