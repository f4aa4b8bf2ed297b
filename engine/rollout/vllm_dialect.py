"""vLLM's HTTP API (checked against 0.32): OpenAI completions and its endpoints for training.

The latter need `VLLM_SERVER_DEV_MODE=1` in the server's environment, and the NCCL channel
`--weight-transfer-config '{"backend": "nccl"}'`. An `--api-key` guards the /v1 paths alone: whoever
reaches the port can pause and reload, so it belongs on loopback or a private network.

A load that fails leaves weights without storage behind, and the next request ends the server: it
stays paused until a load succeeds. After a wrong path it will; after a tensor of another shape it
never does. Tensors that a load lacks are kept from before without a word. Hence all that can be
checked is checked before (`weight_folder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdpbench.engine.rollout.dialects import (
    GenerationRequest,
    ServerCall,
    ServerFacts,
    broken_answer,
    check_unpadded,
)
from fsdpbench.errors import WeightSyncError

if TYPE_CHECKING:
    from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress

TOKEN_PREFIX = "token_id:"  # of the servers' names for tokens without a tokenizer
# One call receives one bucket: the server's own buffer must not cut it in two.
PACKED_BUFFER_BYTES = 1 << 50


class VllmDialect:
    """Requests to a vLLM server and its answers."""

    name = "vllm"
    restores_after_failed_load = False
    joins_by_id = True
    after_failed_load = "If the next load fails as well, restart the server."

    def __init__(self, packed: bool = True) -> None:
        self.packed = packed

    def ask_facts(self) -> Mapping[str, ServerCall]:
        """Ask for the models, the world and the configuration."""
        return {
            "models": ServerCall("/v1/models", method="GET"),
            "world": ServerCall("/get_world_size", method="GET"),
            "label": self.ask_label(),
            "server": ServerCall(
                "/server_info", query={"config_format": "json"}, method="GET", is_optional=True
            ),
        }

    def read_facts(self, answers: Mapping[str, Any]) -> ServerFacts:
        """Read the answers to `ask_facts`."""
        try:
            card = answers["models"]["data"][0]
            model, folder = card["id"], str(card.get("root") or "")
            world_size = answers["world"]["world_size"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise broken_answer("vllm: /v1/models, /get_world_size", answers) from error
        config = (answers["server"] or {}).get("vllm_config") or {}
        return ServerFacts(
            model,
            folder,
            world_size,
            self.read_label(answers["label"]),
            **self._read_channel(config),
            logprobs_follow_temperature=_find(config, "model_config", "logprobs_mode")
            in (None, "processed_logprobs"),
        )

    def pause(self, in_flight: str) -> list[ServerCall]:
        """Stop, abort or wait, and clear the caches."""
        return [ServerCall("/pause", query={"mode": in_flight})]

    def resume(self) -> list[ServerCall]:
        """Generate again."""
        return [ServerCall("/resume")]

    def join_group(self, address: GroupAddress) -> list[ServerCall]:
        """Join over raw NCCL, with the id that the trainer minted."""
        if not address.unique_id:
            raise WeightSyncError(
                f"group {address.name}: a vLLM server joins by an NCCL id, and the address of this "
                "group carries none. The trainer mints it on GPUs; or switch weight_update_mode to "
                "disk."
            )
        info = {
            "nccl_unique_id_b64": address.unique_id,
            "rank_offset": address.first_rank,
            "world_size": address.world_size,
            "packed": self.packed,
            "packed_buffer_size_bytes": PACKED_BUFFER_BYTES,
            "packed_num_buffers": 1,
        }
        return [ServerCall("/init_weight_transfer_engine", {"init_info": info})]

    def begin_update(self) -> list[ServerCall]:
        """Open a session of buckets."""
        return [ServerCall("/start_weight_update")]

    def receive_bucket(self, bucket: Bucket, address: GroupAddress) -> list[ServerCall]:
        """Receive one bucket; packed or not was settled when the group was joined."""
        del address  # there is one
        if bucket.packed != self.packed:
            raise WeightSyncError(
                f"bucket {bucket.index}: packed={bucket.packed}, but the server joined for "
                f"packed={self.packed}. Plan all buckets of this receiver so."
            )
        check_unpadded(bucket)
        info = {
            "names": [spec.name for spec in bucket.specs],
            "dtype_names": [spec.dtype for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
        }
        return [ServerCall("/update_weights", {"update_info": info})]

    def load_folder(self, path: str, timeout_seconds: float) -> list[ServerCall]:
        """Reload in place on every worker."""
        body = {
            "method": "reload_weights",
            "kwargs": {"weights_path": path},
            "timeout": timeout_seconds,
        }
        return [ServerCall("/collective_rpc", body)]

    def finish_update(self, label: str, *, in_session: bool) -> list[ServerCall]:
        """Close the session of buckets, drop what the cache holds and label the weights."""
        close = [ServerCall("/finish_weight_update", {"weight_version": label})]
        return [
            *(close if in_session else []),
            ServerCall("/reset_prefix_cache", is_optional=True, reads_json=False),
            self.label_weights(label),
        ]

    def leave_group(self, address: GroupAddress) -> list[ServerCall]:
        """Leave the group."""
        del address  # there is one
        return [ServerCall("/shutdown_weight_transfer_engine", is_optional=True)]

    def label_weights(self, label: str) -> ServerCall:
        """Set the server's weight version."""
        return ServerCall("/update_weight_version", {"new_version": label}, is_optional=True)

    def ask_label(self) -> ServerCall:
        """Ask for the server's weight version."""
        return ServerCall("/weight_info", method="GET", is_optional=True)

    def read_label(self, answer: Any) -> str | None:
        """Read the server's weight version."""
        label = _find(answer, "weight_version")
        return label if label is None else str(label)

    def generate(self, request: GenerationRequest) -> ServerCall:
        """Complete one sequence of token ids."""
        settings = request.settings
        body: dict[str, Any] = {
            "model": request.model,
            "prompt": list(request.tokens),
            "max_tokens": request.num_left,
            "temperature": settings.temperature,
            "seed": request.seed,
            # stated, since the model's generation_config.json would have its say otherwise
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,  # also what spares the server a tokenizer
            "return_token_ids": True,
        }
        if settings.stop_token_ids is not None:
            body |= {"ignore_eos": True, "stop_token_ids": list(settings.stop_token_ids)}
        return ServerCall("/v1/completions", body)

    def read_generation(self, answer: Any) -> dict[str, Any]:
        """Read the one choice of a completion."""
        try:
            (choice,) = answer["choices"]
            logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            tokens = [int(name.removeprefix(TOKEN_PREFIX)) for name in logprobs["tokens"]]
            values = [float(value) for value in logprobs["token_logprobs"]]
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise broken_answer("vllm: /v1/completions", answer) from error
        if reason not in ("stop", "length", "abort") or len(tokens) != len(values):
            raise broken_answer("vllm: /v1/completions", answer)
        return {"tokens": tokens, "logprobs": values, "finish_reason": reason}

    def score(self, model: str, tokens: Sequence[int]) -> ServerCall:
        """Ask for the log-probs of the prompt; one token must be generated besides."""
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
        return ServerCall("/v1/completions", body)

    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        """Read the prompt's log-probs."""
        try:
            (choice,) = answer["choices"]
            entries = choice["prompt_logprobs"][1:]  # nothing stands before the first token
            pairs = zip(entries, tokens[1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (KeyError, TypeError, ValueError) as error:
            raise broken_answer("vllm: /v1/completions, prompt_logprobs", answer) from error

    def read_failure(self, answer: Any) -> str | None:
        """Failures have a status of their own."""
        del answer
        return None

    @staticmethod
    def _read_channel(config: Mapping[str, Any]) -> dict[str, Any]:
        """Say whether the server can join a group; unknown counts as yes, its answer will tell."""
        why = ""
        if _find(config, "device_config", "device") == "cpu":
            why = "the server runs on the CPU and has no NCCL"
        elif config and _find(config, "weight_transfer_config", "backend") != "nccl":
            why = """start it with --weight-transfer-config '{"backend": "nccl"}'"""
        return {"takes_groups": not why, "why_no_groups": why}


def _find(answer: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(answer, Mapping):
            return None
        answer = answer.get(name)
    return answer
