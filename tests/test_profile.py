"""Profiles as files: what is refused, in one sentence, before a simulator meets it."""

import json

import pytest

from hipress.errors import UsageError
from hipress.profile import Profile, version_of
from tests.secopa.made_up import profile

TEXT = profile().model_dump_json()


def changed(*place, value):
    """The text of a profile with one value changed."""
    document = json.loads(TEXT)
    *folders, last = place
    found = document
    for folder in folders:
        found = found[folder]
    found[last] = value
    return json.dumps(document)


def test_a_saved_profile_is_read_as_it_was(tmp_path):
    """Catches: a check that refuses what a measurement writes."""
    profile().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile()


@pytest.mark.parametrize(
    "place, value, text",
    [
        (("network", "bytes_per_s"), float("inf"), "network.bytes_per_s"),
        (("network", "latency_s"), float("nan"), "network.latency_s"),
        (("network", "hosts"), [], "network.hosts"),
        (("network", "local_bytes_per_s"), 0, "network.local_bytes_per_s"),
        (("codecs", 0, "back_wire"), {}, "codecs.0.back_wire"),
        (("model", "bucket_mb"), 0, "model.bucket_mb"),
        (("model", "element_bytes"), 0, "model.element_bytes"),
        (("version",), 0, "version"),
        (("model", "gradients", 1, "name"), "g0", "model: gradient 'g0' is there twice"),
        (("model", "buckets"), [["g0", "g1"], [], ["g2", "g3"]], "model: a bucket is empty"),
        (("model", "buckets"), [["g0", "g1", "g2"]], "model: gradient 'g3' is in no bucket"),
        (("model", "buckets"), [["g0", "g1", "g2", "g3"], ["g0"]], "'g0' is in two places"),
        (("model", "buckets"), [["g0", "g1", "g2", "g3", "x"]], "holds 'x', which is no gradient"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_in_one_sentence(place, value, text):
    """Catches: a simulator that never ends, divides by zero, or does not find a gradient."""
    with pytest.raises(UsageError) as raised:
        Profile.parse(changed(*place, value=value), "'p.json'")
    said = str(raised.value)
    assert said.startswith("profile 'p.json' is not a profile: ") and text in said
    assert said.endswith("make one with hipress profile -o profile.json.") and "\n" not in said


def test_buckets_that_hold_every_gradient_are_taken():
    """Catches: a check that buckets of DDP do not pass."""
    text = changed("model", "buckets", value=[["g1", "g0"], ["g3", "g2"]])
    assert Profile.parse(text).model.buckets == (("g1", "g0"), ("g3", "g2"))


def test_a_newer_profile_says_so_though_it_has_other_fields():
    """Catches: a user who is told of a field, and not to update."""
    newer = json.dumps({"version": 7, "machines": []})
    with pytest.raises(UsageError, match="has version 7 .* update hipress, or measure again"):
        Profile.parse(newer)


@pytest.mark.parametrize("text", ["", "[1]", '{"version": "2"}', "[" * 10**5, b"\xff"])
def test_what_says_no_version_has_none(text):
    """Catches: a traceback in place of the sentence of the check behind it."""
    assert version_of(text) == 0


def test_a_plan_is_no_profile_and_says_so():
    """Catches: advice to update hipress where the wrong file was given."""
    text = '{"version": 2, "gradients": {"w": {"codec": "int8"}}}'
    with pytest.raises(UsageError, match=r"is not a profile: the file: this is a plan"):
        Profile.parse(text)
