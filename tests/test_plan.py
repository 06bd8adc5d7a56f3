"""Plans: read, checked, never changed."""

import json

import pytest
from pydantic import ValidationError

from hipress.errors import UsageError
from hipress.plan import Decision, Plan


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "plan.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


def test_a_plan_is_read(write):
    """Catches: fields that are lost on the way from the file."""
    plan = Plan.load(
        write(
            {
                "version": 1,
                "epoch": 3,
                "gradients": {
                    "a": {"codec": "onebit", "strategy": "ring", "partitions": 4},
                    "b": {"reason": "small"},
                },
            }
        )
    )
    assert plan.epoch == 3
    assert plan.decision("a") == Decision(codec="onebit", strategy="ring", partitions=4)
    assert plan.decision("b") == Decision(codec="none", strategy="ps", reason="small")
    assert plan.decision("c") == Decision(reason="not in the plan")


def test_a_plan_is_what_was_written(write):
    """Catches: a plan that can not be read back."""
    plan = Plan(epoch=2, gradients={"a": Decision(codec="int8", partitions=2)})
    assert Plan.load(write(plan.model_dump_json().encode())) == plan
    assert Plan.load(str(write(plan.model_dump()))) == plan


def test_a_plan_does_not_change():
    """Catches: a plan that one rank alters after all have agreed on it."""
    plan = Plan(gradients={"a": Decision()})
    with pytest.raises(ValidationError):
        plan.epoch = 5
    with pytest.raises(ValidationError):
        plan.decision("a").codec = "onebit"


@pytest.mark.parametrize(
    "content, where",
    [
        (b"", "the file"),
        (b"{", "the file"),
        (b"\xff\xfe", "the file"),
        ([], "the file"),
        ({"gradients": []}, "gradients"),
        ({"gradients": {"a": "onebit"}}, "gradients.a"),
        ({"gradients": {"a": {"codec": 3}}}, "gradients.a.codec"),
        ({"gradients": {"a": {"partitions": 0}}}, "gradients.a.partitions"),
        ({"gradients": {"a": {"partitions": 1.5}}}, "gradients.a.partitions"),
        ({"gradients": {"a": {"codecs": "onebit"}}}, "gradients.a.codecs"),
        ({"epoch": "first"}, "epoch"),
        ({"plans": {}}, "plans"),
    ],
)
def test_what_is_no_plan(write, content, where):
    """Catches: a plan with a typing error that is followed in part; an error of another kind."""
    path = write(content)
    with pytest.raises(UsageError) as refused:
        Plan.load(path)
    text = str(refused.value)
    assert text.startswith(f"plan {str(path)!r} is not a plan: {where}: ")
    assert '{"version": 1, "gradients": {"fc.weight": {"codec": "onebit"}}}' in text
    assert "\n" not in text


def test_a_newer_plan(write):
    """Catches: a plan of which this reader knows half."""
    with pytest.raises(UsageError, match="has version 2 and this hipress reads up to 1; update"):
        Plan.load(write({"version": 2}))


def test_no_file(tmp_path):
    """Catches: a bare OSError."""
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\)"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\)"):
        Plan.load(tmp_path)
