"""Which generation server a client speaks to, and how. No torch, no network."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpbench.errors import ConfigError, Violation


@dataclass(frozen=True)
class ServerSettings:
    """Which server, and how it is spoken to."""

    url: str  # http://host:port
    dialect: str  # vllm or sglang
    token: str | None = field(default=None, repr=False)  # the server's API key
    version: int = 0  # of the weights that the server holds when we connect
    timeout_seconds: float = 300.0  # of each call
    max_concurrent: int = 256  # sequences that are at the server at one time
    packed: bool = True  # whether it gets flat buckets; else one message a tensor

    def __post_init__(self) -> None:
        checks = {
            "url": (
                self.url.startswith(("http://", "https://")),
                "begins with http:// or https://",
            ),
            "dialect": (self.dialect in ("vllm", "sglang"), "is vllm or sglang"),
            "timeout_seconds": (self.timeout_seconds > 0, "must be positive"),
            "max_concurrent": (self.max_concurrent >= 1, "must be at least 1"),
        }
        violations = [
            Violation(name, repr(getattr(self, name)), allowed)
            for name, (right, allowed) in checks.items()
            if not right
        ]
        if violations:
            raise ConfigError(violations)
