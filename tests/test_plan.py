"""Plans: read and written in both formats, checked, never changed."""

import json
import os
import stat

import pytest
from pydantic import ValidationError

from hipress.errors import UsageError
from hipress.plan import ANY, VERSION, Decision, Plan


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


FULL = Plan(
    epoch=2,
    num_ranks=4,
    step_s=0.25,
    plain_step_s=0.5,
    made_from="a test",
    schedule="overlap",
    slice_bytes=2**20,
    credit_bytes=2**22,
    gradients={
        "a": Decision(
            codec="int8", strategy="ring", partitions=2, bulk=0, order=-3, numel=7,
            compressed_s=0.25, plain_s=0.375, reason="pays",
        ),
        "b": Decision(reason="small", numel=5),
    },
)  # fmt: skip


def test_a_plan_is_what_was_written(write, tmp_path):
    """Catches: a plan that cannot be read back."""
    assert Plan.load(write(FULL.model_dump_json().encode())) == FULL
    assert Plan.load(str(write(FULL.model_dump()))) == FULL
    FULL.save(tmp_path / "saved.json")
    assert Plan.load(tmp_path / "saved.json") == FULL


def test_what_a_plan_file_holds(tmp_path):
    """Catches: a file that people do not like to read, or one without its version."""
    Plan(gradients={"a": Decision(codec="int8")}).save(tmp_path / "p.json")
    assert (tmp_path / "p.json").read_text().splitlines() == [
        "{", f' "version": {VERSION},', ' "epoch": 0,', ' "made_from": "",', ' "gradients": {',
        '  "a": {', '   "codec": "int8",', '   "strategy": "ps",', '   "reason": ""', "  }", " }",
        "}",
    ]  # fmt: skip


def test_a_plan_of_version_1(write, tmp_path):
    """Catches: plans that others wrote before; one that is saved as version 1 with new fields."""
    plan = Plan.load(write({"version": 1, "gradients": {"a": {"codec": "onebit"}}}))
    assert plan == Plan(gradients={"a": Decision(codec="onebit")})
    plan.save(tmp_path / "new.json")
    assert json.loads((tmp_path / "new.json").read_text())["version"] == VERSION


def test_a_plan_of_version_2_plans_no_schedule(write):
    """Catches: plans that others wrote before refused; an order that nobody has planned."""
    plan = Plan.load(write({"version": 2, "gradients": {"a": {"codec": "int8", "order": 1}}}))
    assert (plan.schedule, plan.slice_bytes, plan.credit_bytes) == (None, None, None)
    assert plan == Plan(gradients={"a": Decision(codec="int8", order=1)})


def test_saving_replaces_the_file_at_once(tmp_path):
    """Catches: half a plan that a rank reads; what is left lying beside; a link that is cut."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    before = os.stat(real).st_ino
    with real.open() as reader:
        FULL.save(link)
        assert reader.read() == "old"
    assert os.stat(real).st_ino != before
    assert link.is_symlink() and Plan.load(real) == FULL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_saving_to_what_is_no_file(tmp_path):
    """Catches: a pipe or a device that is replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        FULL.save(pipe)
        assert Plan.parse(os.read(reader, 10_000).decode()) == FULL
        assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    finally:
        os.close(reader)


def test_a_plan_that_cannot_be_written(tmp_path):
    """Catches: a bare OSError."""
    with pytest.raises(UsageError, match=r"cannot be written \(No such file or directory\); give"):
        FULL.save(tmp_path / "none" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"cannot be written \(Is a directory\); give a file in"):
        FULL.save(tmp_path / "folder")


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
        (b" \r\n", "the file"),
        ([], "line 1"),
        ({"gradients": []}, "gradients"),
        ({"gradients": {"a": "onebit"}}, "gradients.a"),
        ({"gradients": {"a": {"codec": 3}}}, "gradients.a.codec"),
        ({"gradients": {"a": {"partitions": 0}}}, "gradients.a.partitions"),
        ({"gradients": {"a": {"partitions": 1.5}}}, "gradients.a.partitions"),
        ({"gradients": {"a": {"codecs": "onebit"}}}, "gradients.a.codecs"),
        ({"epoch": "first"}, "epoch"),
        ({"version": 0}, "version"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"step_s": -1.0}, "step_s"),
        ({"gradients": {"a": {"bulk": -1}}}, "gradients.a.bulk"),
        ({"gradients": {"a": {"numel": -1}}}, "gradients.a.numel"),
        ({"gradients": {"a": {"plain_s": float("inf")}}}, "gradients.a.plain_s"),
        ({"plans": {}}, "plans"),
        ({"schedule": "lifo"}, "schedule"),
        ({"slice_bytes": 0}, "slice_bytes"),
        ({"slice_bytes": 1.5}, "slice_bytes"),
        ({"credit_bytes": -1}, "credit_bytes"),
    ],
)
def test_what_is_no_plan(write, content, where):
    """Catches: a plan with a typing error that is followed in part; an error of another kind."""
    path = write(content)
    with pytest.raises(UsageError) as refused:
        Plan.load(path)
    text = str(refused.value)
    assert text.startswith(f"plan {str(path)!r} is not a plan: {where}: ")
    assert text.endswith(
        '; write {"version": 3, "gradients": {"fc.weight": {"codec": "onebit"}}}, or lines '
        "name,size,y|n,partitions or name,y|n,partitions."
    )
    assert "\n" not in text


def test_a_newer_plan(write):
    """Catches: a plan of which this reader knows half."""
    with pytest.raises(UsageError, match="has version 4 and this hipress reads up to 3; update"):
        Plan.load(write({"version": 4, "gradients": [], "new": 1}))


def test_no_file(tmp_path):
    """Catches: a bare OSError."""
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\)"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\)"):
        Plan.load(tmp_path)


# --- SeCoPaPlan.txt -------------------------------------------------------------------------------

OPEN, LEFT = {"codec": ANY, "strategy": ANY}, {"codec": "none", "strategy": ANY}


@pytest.mark.parametrize(
    "content",
    [
        b"a.weight,12,y,4\nb,3,n,2\n",
        b"a.weight,12,y,4\nb,3,n,2",
        b"\r\na.weight,12,Y,4\r\n\r\nb,3,N,2\r\n\r\n",
        b" a.weight , 12 , y , 04 \n\tb,3,n,2\n",
        b"\xef\xbb\xbfa.weight,12,y,4\nb,3,n,2\n",
    ],
    ids=["lines", "no-last-end", "crlf-blanks-capitals", "spaces", "byte-order-mark"],
)
def test_a_text_plan_is_read(write, content):
    """Catches: fields in the wrong place; a file from another system that is refused."""
    assert Plan.load(write(content)).gradients == {
        "a.weight": Decision(**OPEN, partitions=4, numel=12),
        "b": Decision(**LEFT, partitions=2, numel=3),
    }


def test_three_fields_are_read(write):
    """Catches: the form that the original's README describes; both forms in one file."""
    plan = Plan.load(write(b"a,y,4\nb,9,n,1\n"))
    assert plan.decision("a") == Decision(**OPEN, partitions=4)
    assert plan.decision("b") == Decision(**LEFT, partitions=1, numel=9)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"a,y\n", "line 1: 'a,y' has 2 fields"),
        (b"a,1,y,4\n\nfc,weight,1,y,4\n", "line 3: 'fc,weight,1,y,4' has 5 fields"),
        (b",1,y,4", "line 1: ',1,y,4' has no name"),
        (b"a,1.5,y,4", "line 1: size '1.5' is no number of elements"),
        (b"a,-1,y,4", "line 1: size '-1' is no number of elements"),
        (b"a,1,yes,4", "line 1: 'yes' is neither y nor n"),
        (b"a,1,,4", "line 1: '' is neither y nor n"),
        (b"a,y,0", "line 1: partitions '0' is no number from 1 on"),
        (b"a,y,two", "line 1: partitions 'two' is no number from 1 on"),
        (b"a,y,\xc2\xb2", "line 1: partitions '\u00b2' is no number from 1 on"),
        (b"a,y,1\r\na,n,1", "line 2: 'a' is there twice"),
    ],
)
def test_lines_that_are_no_plan(write, content, why):
    """Catches: a line that is skipped, so that its gradient is left alone and nobody told."""
    path = write(content)
    with pytest.raises(UsageError) as refused:
        Plan.load(path)
    assert str(refused.value).startswith(f"plan {str(path)!r} is not a plan: {why}; write ")
    assert str(refused.value).endswith(" or lines name,size,y|n,partitions or name,y|n,partitions.")


def test_a_text_plan_is_what_was_written(tmp_path):
    """Catches: a text plan that changes on its way through us."""
    text = "a,12,y,4\nb,3,n,2\n"
    Plan.parse(text).save(tmp_path / "p.txt")
    assert (tmp_path / "p.txt").read_bytes() == text.encode()


def test_a_gradient_left_alone_is_written_with_the_number_of_ranks():
    """Catches: a line that the original would not have written."""
    assert FULL.as_text() == "a,7,y,2\nb,5,n,4\n"
    assert Plan(gradients={"b": Decision(numel=5)}).as_text() == "b,5,n,1\n"


@pytest.mark.parametrize(
    "name, decision, what",
    [
        ("a", Decision(), "has no size (numel)"),
        ("a", Decision(codec="int8", numel=5), "has no partitions"),
        ("a,b", Decision(numel=5), "has a name with , or blanks"),
        ("a\nb", Decision(numel=5), "has a name with , or blanks"),
        (" a", Decision(numel=5), "has a name with , or blanks"),
    ],
)
def test_what_lines_cannot_hold(tmp_path, name, decision, what):
    """Catches: a text plan that is read as another."""
    with pytest.raises(UsageError) as refused:
        Plan(gradients={name: decision}).save(tmp_path / "p.txt")
    assert str(refused.value) == (
        f"gradient {name!r} {what}, and a text plan is lines name,size,y|n,partitions; save the "
        "plan as .json."
    )
    assert list(tmp_path.iterdir()) == []


def test_codec_and_strategy_are_filled_in():
    """Catches: what a plan says itself overwritten; a gradient left alone that gets a codec."""
    plan = Plan(
        epoch=3,
        gradients={
            "a": Decision(**OPEN, partitions=4),
            "b": Decision(**LEFT),
            "c": Decision(codec="int8", strategy="ring"),
            "d": Decision(**LEFT, numel=2**17),
        },
    )
    assert plan.with_codec("onebit", "hierarchical") == Plan(
        epoch=3,
        gradients={
            "a": Decision(codec="onebit", strategy="hierarchical", partitions=4),
            "b": Decision(codec="none", strategy="ps"),
            "c": Decision(codec="int8", strategy="ring"),
            "d": Decision(codec="none", strategy="allreduce", numel=2**17),
        },
    )
    assert plan.with_codec("onebit").decision("a").strategy == "ps"


@pytest.mark.parametrize(
    "plan, codec, strategy",
    [
        (Plan(), False, False),
        (Plan(gradients={"a": Decision(codec="int8")}), False, False),
        (Plan(gradients={"a": Decision(codec=ANY)}), True, False),
        (Plan.parse("a,y,1"), True, True),
        (Plan.parse("a,n,1"), True, True),
        (Plan.parse("a,y,1").with_codec("int8"), False, False),
    ],
    ids=["empty", "decided", "codec", "text", "text-none", "filled"],
)
def test_what_a_plan_leaves_open(plan, codec, strategy):
    """Catches: a codec beside a plan that decides, or none beside one that does not."""
    assert (plan.takes_codec, plan.takes_strategy) == (codec, strategy)


def test_a_profile_is_no_plan_and_says_so():
    """Catches: raw text of a parser where the wrong file was given."""
    with pytest.raises(UsageError, match=r"is a profile; make a plan from it with hipress plan"):
        Plan.read({"version": 1, "network": {}, "machine": {}})
