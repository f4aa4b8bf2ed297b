"""The tracer's settings."""

from __future__ import annotations

import pytest

from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.errors import ConfigError


def test_defaults():
    config = PerfTracerConfig()
    assert (config.enabled, config.output_dir, config.max_events) == (False, "traces", 100_000)


def test_refuses_no_room_and_unknown_keys_at_once():
    with pytest.raises(ConfigError) as caught:
        PerfTracerConfig(max_events=0, output_dri="x")
    places = {violation.where for violation in caught.value.violations}
    assert places == {"max_events", "output_dri"}
