from __future__ import annotations

import pytest

from fsdpbench.reports.axes import name_trial, plan_axes, plan_titles
from tests.reports.example_runs import make_record


def records_of(*axes):
    return [make_record(index, axes=values) for index, values in enumerate(axes)]


def test_constant_axes_are_told_from_varied_ones():
    records = records_of(
        {"parallel": "fsdp:d2", "lr": 0.1, "seed": 1}, {"parallel": "fsdp:t2", "lr": 0.1, "seed": 1}
    )
    axes = plan_axes(records)
    assert [axis.path for axis in axes.varied] == ["parallel"]
    assert axes.constant == (("lr", "0.1"), ("seed", "1"))


def test_an_axis_that_some_trials_lack_varies():
    axes = plan_axes(records_of({"lr": 0.1}, {}))
    assert [axis.path for axis in axes.varied] == ["lr"]


def test_one_trial_names_all_its_axes():
    axes = plan_axes(records_of({"lr": 0.1}))
    assert [axis.path for axis in axes.varied] == ["lr"]
    assert axes.constant == ()


def test_titles_are_the_shortest_tails_that_differ():
    titles = plan_titles(["optimizer.type", "fsdp.type", "fsdp.offload_params", "parallel"])
    assert titles == {
        "optimizer.type": "optimizer.type",
        "fsdp.type": "fsdp.type",
        "fsdp.offload_params": "offload_params",
        "parallel": "parallel",
    }
    assert plan_titles(["type", "fsdp.type"])["type"] == "type"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"parallel": "fsdp:d2", "f.offload": True, "lr": 0.1}, "fsdp:d2 +offload lr=0.1"),
        ({"parallel": "fsdp:d2", "f.offload": False, "lr": None}, "fsdp:d2 lr=null"),
        ({"f.offload": False}, "offload=false"),
        ({}, "t000"),
    ],
)
def test_a_trial_is_named_by_what_it_varies(values, name):
    other = {"parallel": "fsdp:t2", "f.offload": True, "lr": 1.0}
    axes = plan_axes(records_of({"parallel": "fsdp:d2", "f.offload": False, "lr": 0.1}, other))
    assert name_trial(values, axes, "t000") == name


def test_a_long_name_is_cut():
    axes = plan_axes(records_of({"note": "a" * 500}))
    assert len(name_trial({"note": "a" * 500}, axes, "t", limit=40)) == 40
