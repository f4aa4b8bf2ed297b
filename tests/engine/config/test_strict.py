"""The base class: everything that is wrong is said once, with paths, as a ConfigError."""

from __future__ import annotations

import copy
import pickle

import pytest

from fsdpbench.engine.config.strict import (
    BelowOne,
    Count,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Real,
    StrictModel,
    copy_sections,
    field_paths,
    rule,
    set_path,
)
from fsdpbench.errors import ConfigError, Violation


class Inner(StrictModel):
    speed: Positive = 1.0
    """How fast."""
    gears: Count = 5
    """How many."""

    @rule("speed", "gears")
    def _fast_needs_gears(self):
        if self.speed > 100 and self.gears < 6:
            return Violation("speed", str(self.speed), "needs 6 gears")
        return None


class Outer(StrictModel):
    name: str
    """Required."""
    inner: Inner = Inner()
    """A section."""
    spare: Inner | None = None
    """A section or nothing."""
    on: Flag = False
    """A switch."""
    share: Fraction = 0.5
    """A share."""

    @rule("on", "inner.speed")
    def _on_means_slow(self):
        if self.on and self.inner.speed > 10:
            return Violation("on", "True", "inner.speed must be 10 or less")
        return None


def violations_of(build):
    with pytest.raises(ConfigError) as caught:
        build()
    assert isinstance(caught.value, ValueError)
    return {violation.where: violation for violation in caught.value.violations}


def test_valid_values_are_kept_and_frozen():
    outer = Outer(name="a", inner={"speed": 3})
    assert (outer.inner.speed, outer.inner.gears, outer.spare) == (3.0, 5, None)
    assert set(violations_of(lambda: setattr(outer, "name", "b"))) == {"name"}
    assert outer.name == "a"
    assert pickle.loads(pickle.dumps(outer)) == outer == copy.deepcopy(outer)
    assert hash(outer) == hash(Outer(name="a", inner=Inner(speed=3.0)))


def test_all_violations_come_at_once_with_dotted_paths():
    found = violations_of(
        lambda: Outer(
            inner={"speed": -1, "gear": 3, "gears": 0}, spare={"speed": 200}, on=True, share=2, x=1
        )
    )
    assert set(found) == {
        "name",  # missing
        "inner.speed",
        "inner.gear",
        "inner.gears",
        "spare.speed",  # a rule of the section
        "share",
        "x",
    }
    assert found["name"].allowed == "is required"
    assert found["inner.gear"].remedy == "did you mean gears?"
    assert str(found["inner.gears"]) == "inner.gears=0: must be greater than or equal to 1"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # the rule speaks beside errors in fields that it does not read
        ({"name": "a", "on": True, "inner": {"speed": 20}, "share": 9}, {"on", "share"}),
        ({"on": True, "inner": {"speed": 20, "gears": 0}}, {"name", "on", "inner.gears"}),
        ({"name": "a", "on": True, "inner": {"speed": 20, 3: 4}}, {"on", "inner.3"}),
        # and is silent when what it reads is wrong
        ({"name": "a", "on": True, "inner": {"speed": "20"}}, {"inner.speed"}),
        ({"name": "a", "on": 1, "inner": {"speed": 20}}, {"on"}),
        ({"name": "a", "on": True, "inner": {"speed": 200, "gears": 2}}, {"inner.speed"}),
        ({"name": "a", "on": True, "inner": 7}, {"inner"}),
    ],
)
def test_rules_and_field_errors_are_reported_together(data, expected):
    assert set(violations_of(lambda: Outer(**data))) == expected
    assert set(violations_of(lambda: Outer.model_validate(data))) == expected


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Flag, [True, False], [0, 1, "true", None]),
        (Count, [1, 10**12], [0, -1, True, 1.0, "1", None]),
        (Real, [-1.5, 2], ["1", True, float("nan"), float("inf")]),
        (NonNegative, [0, 0.0, 3], [-1e-9, float("inf")]),
        (Positive, [1e-9, 1], [0, -1]),
        (Fraction, [0, 1, 0.5], [-0.1, 1.1]),
        (BelowOne, [0, 0.999], [1, -0.1]),
    ],
    ids=["flag", "count", "real", "nonnegative", "positive", "fraction", "below one"],
)
def test_scalars_are_typed(kind, good, bad):
    class Holder(StrictModel):
        value: kind

    for value in good:
        assert Holder(value=value).value == value
    for value in bad:
        assert "value" in violations_of(lambda value=value: Holder(value=value))


@pytest.mark.parametrize("key", ["self", "cls", "data", "model_config", "rules"])
def test_no_key_slips_past(key):
    assert set(violations_of(lambda: Outer.model_validate({"name": "a", key: 1}))) == {key}


def test_keys_that_are_no_strings_are_refused_at_every_depth():
    found = violations_of(lambda: Outer.model_validate({"name": "a", 1: 2, "inner": {None: 1}}))
    assert set(found) == {"1"}
    found = violations_of(lambda: Outer.model_validate({"name": "a", "inner": {None: 1, "z": 1}}))
    assert set(found) == {"inner.None", "inner.z"}


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_only_mappings_validate(value):
    assert violations_of(lambda: Outer.model_validate(value))


def test_an_unknown_key_of_another_section_names_that_section():
    found = violations_of(lambda: Outer(name="a", speed=3))
    assert found["speed"].remedy == "did you mean inner.speed?"
    found = violations_of(lambda: Outer(name="a", inner={"share": 0.5}))
    assert found["inner.share"].remedy == "did you mean share?"
    found = violations_of(lambda: Outer(name="a", qqq=3))
    assert found["qqq"].remedy == "fields: name, inner, spare, on, share"


def test_with_changes_rebuilds_through_every_check():
    outer = Outer(name="a", inner={"gears": 3})
    changed = outer.with_changes({"inner.speed": 7.0, "spare.gears": 2, "on": True})
    assert changed == Outer(name="a", on=True, inner=Inner(speed=7, gears=3), spare=Inner(gears=2))
    assert outer == Outer(name="a", inner=Inner(gears=3))
    assert set(violations_of(lambda: outer.with_changes({"inner.speed": 200.0}))) == {"inner.speed"}
    assert set(violations_of(lambda: outer.with_changes({"inner.sped": 1}))) == {"inner.sped"}
    assert set(violations_of(lambda: outer.with_changes({"name.x": 1}))) == {"name.x"}


def test_set_path_and_copy_leave_the_original():
    data = {"a": {"b": 1}, "l": [1]}
    copied = copy_sections(data)
    set_path(copied, "a.c.d", 2)
    copied["l"].append(2)
    assert data == {"a": {"b": 1}, "l": [1]}
    assert copied == {"a": {"b": 1, "c": {"d": 2}}, "l": [1, 2]}


def test_field_paths_lists_leaves():
    paths = ["name", "inner.speed", "inner.gears", "spare.speed", "spare.gears", "on", "share"]
    assert list(field_paths(Outer)) == paths


def test_a_subclass_inherits_rules_and_may_replace_them():
    class Calm(Inner):
        def _fast_needs_gears(self):
            return None

    class Strict(Inner):
        @rule("gears")
        def _two_gears_at_least(self):
            return Violation("gears", "1", "too few") if self.gears < 2 else None

    assert Calm(speed=200).speed == 200
    assert set(violations_of(lambda: Strict(speed=200, gears=1))) == {"speed", "gears"}
