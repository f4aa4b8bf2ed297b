"""The state machine of a rollout engine: each transition, allowed or refused."""

from __future__ import annotations

import pytest

from fsdpbench.engine.rollout.states import EngineState, VersionKeeper
from fsdpbench.errors import WeightSyncError


@pytest.fixture
def keeper():
    one = VersionKeeper()
    one.finish_update(3)
    one.resume()
    return one


def test_nothing_is_generated_before_there_are_weights():
    keeper = VersionKeeper()
    assert (keeper.state, keeper.version) == (EngineState.BROKEN, -1)
    with pytest.raises(WeightSyncError, match="no weights were loaded yet"):
        keeper.resume()


def test_an_update_that_finishes(keeper):
    keeper.pause()
    assert (keeper.state, keeper.version) == (EngineState.PAUSED, 3)
    assert keeper.begin_update()
    assert (keeper.state, keeper.version) == (EngineState.UPDATING, -1)
    assert not keeper.begin_update()
    with pytest.raises(WeightSyncError, match="an update has not finished"):
        keeper.resume()
    keeper.finish_update(4)
    assert (keeper.state, keeper.version) == (EngineState.PAUSED, 4)
    keeper.resume()
    assert (keeper.state, keeper.version) == (EngineState.READY, 4)


def test_an_update_of_a_generating_engine_is_refused(keeper):
    with pytest.raises(WeightSyncError, match="Call pause_generation first"):
        keeper.begin_update()
    assert (keeper.state, keeper.version) == (EngineState.READY, 3)


def test_a_broken_update_stays_broken_until_another_finishes(keeper):
    keeper.pause()
    keeper.begin_update()
    keeper.give_up_update("the trainer left", touched=True)
    keeper.give_up_update("again", touched=True)
    keeper.pause()
    assert (keeper.state, keeper.version) == (EngineState.BROKEN, -1)
    with pytest.raises(WeightSyncError, match=r"the trainer left.*weight_update_mode to disk"):
        keeper.check_weights()
    keeper.begin_update()
    keeper.give_up_update("refused at once", touched=False)  # but the weights were broken before
    assert keeper.state is EngineState.BROKEN
    keeper.begin_update()
    keeper.finish_update(9)
    keeper.check_weights()
    assert keeper.version == 9


def test_weights_that_nothing_touched_stay_in_force(keeper):
    keeper.pause()
    keeper.begin_update()
    keeper.give_up_update("refused at once", touched=False)
    assert (keeper.state, keeper.version) == (EngineState.PAUSED, 3)
