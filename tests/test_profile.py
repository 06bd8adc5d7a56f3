"""Profiles as files: what is refused, in one sentence, before a simulator meets it."""

import json

import pytest

from hipress.errors import UsageError
from hipress.profile import VERSION, Profile, version_of
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
        (("model", "gradients", 0, "needed_s"), -1, "model.gradients.0.needed_s"),
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


def test_a_profile_of_version_1_has_no_moments_of_forward(tmp_path):
    """Catches: older profiles that are refused; one saved as version 1 with new fields."""
    document = json.loads(TEXT) | {"version": 1}
    for gradient in document["model"]["gradients"]:
        del gradient["needed_s"]
    found = Profile.parse(json.dumps(document))
    assert found == profile()
    found.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["version"] == VERSION


def test_a_forward_pass_that_was_not_measured_is_the_mirror_image_of_backward():
    """Catches: the first layer, which backward computes last, needed last."""
    model = profile(numels=(1, 1, 1, 1), forward_s=2.0, backward_s=8.0).model
    assert [model.needed_s_of(one) for one in model.gradients] == [1.5, 1.0, 0.5, 0.0]
    known = [one.model_copy(update={"needed_s": 5.0}) for one in model.gradients]
    assert [model.needed_s_of(one) for one in known] == [2.0] * 4  # the forward pass has no more
    at_once = profile(numels=(1, 1), forward_s=2.0).model
    assert [at_once.needed_s_of(one) for one in at_once.gradients] == [0.0, 0.0]


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
