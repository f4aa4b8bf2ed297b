"""SGLang's HTTP API: its native /generate and the control endpoints (checked against 0.5.23).

SGLang cannot wait for running requests in a pause: this client waits for its own before, and those
of other clients are aborted. A failed load from disk makes the server load the old weights again.
Sessions of buckets (`/begin_weight_update`) are young; a server without them needs none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdpbench.engine.rollout.dialects import (
    GenerationRequest,
    ServerCall,
    ServerFacts,
    broken_answer,
    check_unpadded,
    quote,
)
from fsdpbench.log import warn_once

if TYPE_CHECKING:
    from fsdpbench.engine.weight_sync.records import Bucket, GroupAddress


LOGGER = logging.getLogger(__name__)


class SglangDialect:
    """Requests to an SGLang server and its answers."""

    name = "sglang"
    restores_after_failed_load = True
    joins_by_id = False
    after_failed_load = ""

    def ask_facts(self) -> Mapping[str, ServerCall]:
        """Ask for the model and the parallel degrees."""
        return {
            "label": self.ask_label(),
            "server": ServerCall("/server_info", method="GET"),
        }

    def read_facts(self, answers: Mapping[str, Any]) -> ServerFacts:
        """Read the answers to `ask_facts`."""
        try:
            model = answers["label"]["model_path"]
            tp_size, dp_size = answers["server"]["tp_size"], answers["server"].get("dp_size", 1)
            pp_size = answers["server"].get("pp_size", 1)
        except (KeyError, TypeError, AttributeError) as error:
            raise broken_answer("sglang: /model_info, /server_info", answers) from error
        why = ""
        if dp_size > 1 or pp_size > 1:
            why = (
                f"SGLang updates single replicas without pipeline; this has {dp_size=}, {pp_size=}"
            )
        return ServerFacts(
            model, str(model), tp_size, self.read_label(answers["label"]), not why, why
        )

    def pause(self, in_flight: str) -> list[ServerCall]:
        """Stop; what still runs is aborted, and nothing then keeps the cache from being flushed."""
        del in_flight  # it knows no other
        return [
            ServerCall("/pause_generation", {"mode": "abort"}),
            ServerCall("/flush_cache", reads_json=False),
        ]

    def resume(self) -> list[ServerCall]:
        """Generate again."""
        return [ServerCall("/continue_generation", {})]

    def join_group(self, address: GroupAddress) -> list[ServerCall]:
        """Join the trainer's process group."""
        body = {
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": address.first_rank,
            "world_size": address.world_size,
            "group_name": address.name,
            "backend": address.backend,
        }
        return [ServerCall("/init_weights_update_group", body)]

    def begin_update(self) -> list[ServerCall]:
        """Open a session of buckets where the server knows them."""
        return [ServerCall("/begin_weight_update", {}, is_optional=True)]

    def receive_bucket(self, bucket: Bucket, address: GroupAddress) -> list[ServerCall]:
        """Receive one bucket; the cache is flushed once, at the end."""
        check_unpadded(bucket)
        body: dict[str, Any] = {
            "names": [spec.name for spec in bucket.specs],
            "dtypes": [spec.dtype for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
            "group_name": address.name,
            "flush_cache": False,
        }
        if bucket.packed:
            body["load_format"] = "flattened_bucket"
        return [ServerCall("/update_weights_from_distributed", body)]

    def load_folder(self, path: str, timeout_seconds: float) -> list[ServerCall]:
        """Load a folder in place."""
        del timeout_seconds  # the server knows none
        body = {"model_path": path, "flush_cache": True}
        return [ServerCall("/update_weights_from_disk", body)]

    def finish_update(self, label: str, *, in_session: bool) -> list[ServerCall]:
        """Close the session of buckets, flush what the cache holds and label the weights."""
        close = [ServerCall("/end_weight_update", {}, is_optional=True)]
        return [
            *(close if in_session else []),
            ServerCall("/flush_cache", reads_json=False),
            self.label_weights(label),
        ]

    def leave_group(self, address: GroupAddress) -> list[ServerCall]:
        """Leave the group."""
        return [ServerCall("/destroy_weights_update_group", {"group_name": address.name})]

    def label_weights(self, label: str) -> ServerCall:
        """Set the server's weight version."""
        body = {"new_version": label, "abort_all_requests": False}
        return ServerCall("/update_weight_version", body, is_optional=True)

    def ask_label(self) -> ServerCall:
        """Ask for the model, and with it for the weight version."""
        return ServerCall("/model_info", method="GET")

    def read_label(self, answer: Any) -> str | None:
        """Read the server's weight version."""
        label = answer.get("weight_version") if isinstance(answer, Mapping) else None
        return label if label is None else str(label)

    def generate(self, request: GenerationRequest) -> ServerCall:
        """Go on with one sequence of token ids."""
        settings = request.settings
        sampling: dict[str, Any] = {
            "max_new_tokens": request.num_left,
            "temperature": settings.temperature,
            "sampling_seed": request.seed,
            # stated, since the model's generation_config.json would have its say otherwise
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if settings.stop_token_ids:
            warn_once(
                LOGGER,
                "sglang: generation stops at stop_token_ids and at the model's own end tokens; "
                "the server cannot leave the latter out alone",
            )
            sampling["stop_token_ids"] = list(settings.stop_token_ids)
        elif settings.stop_token_ids is not None:
            sampling["ignore_eos"] = True
        body = {
            "input_ids": list(request.tokens),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        return ServerCall("/generate", body)

    def read_generation(self, answer: Any) -> dict[str, Any]:
        """Read tokens and log-probs: [log-prob, token, text] each."""
        try:
            reason = answer["meta_info"]["finish_reason"]["type"]
            # a request that was aborted in the queue tells of no tokens at all
            unknown: dict[str, Any] = {"output_token_logprobs": []} if reason == "abort" else {}
            entries = {**unknown, **answer["meta_info"]}["output_token_logprobs"]
            tokens = [int(entry[1]) for entry in entries]
            values = [float(entry[0]) for entry in entries]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise broken_answer("sglang: /generate", answer) from error
        if reason not in ("stop", "length", "abort"):
            raise broken_answer("sglang: /generate", answer)
        return {"tokens": tokens, "logprobs": values, "finish_reason": reason}

    def score(self, model: str, tokens: Sequence[int]) -> ServerCall:
        """Ask for the log-probs of the prompt."""
        del model  # the native endpoint serves the one it has
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return ServerCall("/generate", body)

    def read_scores(self, answer: Any, tokens: Sequence[int]) -> list[float]:
        """Read the prompt's log-probs: [log-prob, token, text] each, the first without one."""
        try:
            entries = answer["meta_info"]["input_token_logprobs"]
            same = [int(entry[1]) for entry in entries] == list(tokens)
            values = [float(entry[0]) for entry in entries[1:]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise broken_answer("sglang: /generate, input_token_logprobs", answer) from error
        if not same:
            raise broken_answer("sglang: /generate, input_token_logprobs", answer)
        return values

    def read_failure(self, answer: Any) -> str | None:
        """Read `success` and its message."""
        if isinstance(answer, Mapping) and answer.get("success") is False:
            return quote(str(answer.get("message")))
        return None
