from __future__ import annotations

import pytest

from fsdpbench.engine.rollout.server_settings import ServerSettings
from fsdpbench.errors import ConfigError


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError) as caught:
        ServerSettings("localhost", "tgi", timeout_seconds=0, max_concurrent=0)
    assert len(caught.value.violations) == 4


def test_token_is_never_shown():
    assert "s3cret" not in repr(ServerSettings("http://a", "vllm", "s3cret"))
