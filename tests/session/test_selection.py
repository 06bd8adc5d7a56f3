"""Which gradients are compressed, and the reasons for the others."""

import pytest
import torch
from torch import nn

import hipress
from hipress.errors import UsageError
from hipress.plan import MIN_SIZE, Decision, Plan
from hipress.session import selection
from hipress.session.selection import Rules, check_names, rules, skipped
from hipress.torch.adapter import spec_of
from hipress.torch.ddp import clean, sparse_names

LARGE = torch.zeros(64, 64)
NO_SPARSE = frozenset()


def asked(**options):
    given = {
        "codec": None, "strategy": None, "plan": None, "exclude": (), "include": (),
        "min_size": MIN_SIZE, "default_codec": "onebit", **options,
    }  # fmt: skip
    return rules(**given)


def choice(name, parameter=LARGE, sparse=NO_SPARSE, **options):
    return asked(**options).choice(spec_of(name, parameter, is_sparse=name in sparse))


# --- rules ----------------------------------------------------------------------------------------


def test_defaults():
    """Catches: another codec or strategy than the documented ones."""
    found = asked()
    assert (found.codec.name, found.strategy, found.min_size) == ("onebit", "ps", 4096)
    assert found == Rules(codec=found.codec, strategy="ps")


def test_a_codec_may_be_given_itself():
    """Catches: a codec that is made anew from its name."""
    made = hipress.codec("topk(ratio=0.3)")
    assert asked(codec=made).codec is made


def test_one_pattern_may_be_a_text():
    """Catches: a text that is taken for a list of letters."""
    assert asked(exclude="head", include="*.bias").exclude == ("head",)
    assert asked(exclude=iter(["a", "b"])).exclude == ("a", "b")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"codec": 3}, "codec is 3; give an expression such as 'onebit', or a codec."),
        ({"codec": "onebti"}, "did you mean 'onebit'?"),
        ({"strategy": "Ring"}, "strategy 'Ring' (did you mean 'ring'?) is none of ps, ring"),
        ({"min_size": -1}, "min_size is -1; give a number of elements, 0 for all."),
        ({"min_size": True}, "min_size is True"),
        ({"min_size": 1.5}, "min_size is 1.5"),
        ({"exclude": [""]}, "exclude holds ''; give names of parameters or modules, or patterns"),
        ({"include": [3]}, "include holds 3"),
        ({"plan": Plan(), "codec": "int8"}, "given a plan and a codec; the plan decides both"),
        ({"plan": Plan(), "strategy": "ps"}, "given a plan and a strategy"),
        ({"plan": "/nowhere/plan.json"}, "plan '/nowhere/plan.json' cannot be read"),
        ({"plan": Plan(gradients={"w": Decision(strategy="rng")})}, "strategy 'rng'"),
        ({"plan": Plan(gradients={"w": Decision(codec="onebti")})}, "'onebti'"),
    ],
)
def test_what_is_refused(options, text):
    """Catches: an option that is taken as it is and fails later, on some rank, in some step."""
    with pytest.raises(UsageError) as refused:
        asked(**options)
    assert text in str(refused.value)


# --- choices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, parameter, options, reason",
    [
        ("w", LARGE, {}, ""),
        ("w", torch.zeros(64, 63), {}, "4032 elements, fewer than min_size=4096"),
        ("w", torch.zeros(64, 63), {"min_size": 4032}, ""),
        ("w", torch.zeros(0, 5), {"min_size": 0}, ""),
        ("b", torch.zeros(9999), {}, "one dimension (norm or bias)"),
        ("b", torch.zeros(9999), {"min_size": 0}, "one dimension (norm or bias)"),
        ("b", torch.zeros(9999), {"include": "b"}, ""),
        ("b", torch.tensor(1.0), {"include": ["*"]}, ""),
        ("w", LARGE.double(), {"include": "*"}, "codecs do not take float64"),
        ("w", LARGE.bfloat16(), {}, ""),
        ("w", LARGE.half(), {}, ""),
        ("w", LARGE, {"exclude": "w", "include": "w"}, "excluded by 'w'"),
        ("head.weight", LARGE, {"exclude": "head"}, "excluded by 'head'"),
        ("header.weight", LARGE, {"exclude": "head"}, ""),
        ("a.head.weight", LARGE, {"exclude": "head"}, ""),
        ("a.embed.weight", LARGE, {"exclude": "*.embed.*"}, "excluded by '*.embed.*'"),
        ("a.Embed.weight", LARGE, {"exclude": "*.embed.*"}, ""),
        ("l1.w", LARGE, {"exclude": "l[02].w"}, ""),
    ],
)
def test_reasons(name, parameter, options, reason):
    """Catches: a rule that is applied in the wrong order, or to the wrong gradient."""
    found = choice(name, parameter, **options)
    assert found.reason == reason
    assert found.codec.name == ("none" if reason else "onebit")


def test_what_is_left_alone_goes_by_ps():
    """Catches: small gradients that go round the ring."""
    assert choice("b", torch.zeros(9), strategy="ring").strategy == "ps"
    assert choice("w", strategy="ring").strategy == "ring"


def test_sparse_comes_first():
    """Catches: a codec on a sparse gradient, because it was included or is in the plan."""
    for options in ({"include": "w"}, {"plan": Plan(gradients={"w": Decision(codec="onebit")})}):
        found = choice("w", sparse=frozenset({"w"}), **options)
        assert (found.codec.name, found.reason) == ("none", selection.SPARSE)


def test_a_plan_decides_for_what_it_names():
    """Catches: rules of size that overrule a plan, and gradients that it does not name."""
    plan = Plan(
        gradients={
            "b": Decision(codec="int8", strategy="ring", partitions=3),
            "w": Decision(codec="none", reason="too dear"),
            "v": Decision(codec="none"),
        }
    )
    found = choice("b", torch.zeros(9), plan=plan)
    assert (found.codec.name, found.strategy, found.partitions) == ("int8", "ring", 3)
    assert found.reason == ""
    assert choice("w", plan=plan).reason == "too dear"
    assert choice("v", plan=plan).reason == "the plan leaves it uncompressed"
    assert choice("u", plan=plan).reason == "not in the plan"
    assert choice("b", plan=plan, exclude="b").reason == "excluded by 'b'"
    assert choice("b", LARGE.double(), plan=plan).reason == "codecs do not take float64"


def test_skipped_are_those_without_a_codec():
    """Catches: a list that names what is compressed, or forgets what is not."""
    choices = {"w": choice("w"), "b": choice("b", torch.zeros(3))}
    assert skipped(choices) == {"b": "one dimension (norm or bias)"}


# --- names ----------------------------------------------------------------------------------------

NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize("pattern", ["head", "head.bias", "body.0", "body", "*.bias", "*"])
def test_patterns_that_match(pattern):
    """Catches: a pattern that works and is refused."""
    check_names(asked(exclude=pattern, include=pattern), NAMES)


@pytest.mark.parametrize("option", ["exclude", "include"])
@pytest.mark.parametrize(
    "pattern, hint",
    [("hed.weight", " (did you mean 'head.weight'?)"), ("0", ""), ("*.embed.*", ""), ("Head", "")],
)
def test_patterns_that_match_nothing(option, pattern, hint):
    """Catches: a typing error that leaves a gradient compressed."""
    with pytest.raises(UsageError) as refused:
        check_names(asked(**{option: ["head", pattern]}), NAMES)
    assert str(refused.value) == (
        f"{option} pattern {pattern!r} matches no parameter{hint}; the first are: "
        "body.0.weight, body.0.bias, body.1.weight, body.1.bias, head.weight."
    )


def test_a_text_plan_is_filled_in():
    """Catches: a codec or strategy beside a SeCoPaPlan.txt that does not act, or acts on `n`."""
    plan = Plan.parse("w,4096,y,4\nv,4096,n,2")
    made = hipress.codec("topk(ratio=0.3)")
    found = choice("w", plan=plan, codec=made, strategy="ring")
    assert found.codec is made
    assert (found.strategy, found.partitions, found.reason) == ("ring", 4, "")
    assert choice("v", plan=plan, codec="int8").reason == "the plan leaves it uncompressed"
    # What is left alone goes as such gradients go, not by the codec's strategy.
    assert choice("v", plan=plan, strategy="ring").strategy == "ps"
    assert choice("v", torch.zeros(2**17), plan=plan, strategy="ring").strategy == "allreduce"
    assert choice("u", plan=plan, codec="int8").reason == "not in the plan"
    default = choice("w", plan=plan)
    assert (default.codec.name, default.strategy) == (hipress.codec("onebit").name, "ps")
    assert choice("w", plan=plan, codec="none").reason == "codec 'none' was asked for"


def test_a_plan_says_how_what_it_leaves_alone_travels():
    """Catches: large gradients that are not compressed, sent by slow ways."""
    plan = Plan(gradients={"w": Decision(strategy="allreduce")})
    assert choice("w", plan=plan).strategy == "allreduce"


def test_a_plan_of_auto_leaves_alone_what_the_user_or_the_rules_exempt():
    """Catches: `auto` that compresses what was excluded, or an exempt bias."""
    plan = Plan(gradients={name: Decision(codec="int8") for name in ("w", "v", "b")})
    made = asked(exclude="v")
    for name, parameter, codec, reason in (
        ("w", LARGE, "int8", ""),
        ("v", LARGE, "none", "excluded by 'v'"),
        ("b", torch.zeros(9000), "none", "one dimension (norm or bias)"),
    ):
        spec = spec_of(name, parameter, is_sparse=False)
        found = made.choice_under(plan, spec)
        assert (found.codec.name, found.reason) == (codec, reason)
        found = made.choice_under(None, spec)
        assert (found.codec.name, found.reason) == ("none", reason or "auto")


def test_a_plan_that_leaves_only_the_codec_open():
    """Catches: a strategy that overrules the plan's."""
    plan = Plan(gradients={"w": Decision(codec="any", strategy="ring")})
    assert choice("w", plan=plan, codec="int8").strategy == "ring"
    with pytest.raises(UsageError, match="given a plan and a strategy; the plan decides both"):
        asked(plan=plan, strategy="ps")


def test_a_plan_of_another_model():
    """Catches: a plan that compresses nothing, since it is of another model."""
    plan = Plan(gradients={"head.weight": Decision(), "tail.weight": Decision()})
    with pytest.raises(UsageError, match="'tail.weight' .did you mean 'head.weight'.., which this"):
        check_names(asked(plan=plan), NAMES)
    check_names(asked(plan=Plan(gradients={"head.weight": Decision()})), NAMES)


def test_names_without_what_compile_adds():
    """Catches: names that change when a model, or a part of it, is compiled."""
    assert clean("_orig_mod.body.0.weight") == "body.0.weight"
    assert clean("body._orig_mod.0.weight") == "body.0.weight"
    assert clean("body.0.weight") == "body.0.weight"


def test_sparse_tables_are_found():
    """Catches: a sparse table deep in a model, alone, or compiled."""
    model = nn.ModuleDict(
        {
            "a": nn.Embedding(3, 3, sparse=True),
            "b": nn.Embedding(3, 3),
            "c": nn.Sequential(nn.Linear(3, 3), nn.EmbeddingBag(3, 3, sparse=True)),
        }
    )
    assert sparse_names(model) == {"a.weight", "c.1.weight"}
    assert sparse_names(model["a"]) == {"weight"}
    assert sparse_names(torch.compile(model["c"], backend="eager")) == {"1.weight"}


def test_a_plan_for_another_number_of_ranks_is_told(caplog):
    """Catches: a plan whose times and partitions are those of another cluster, in silence."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(80, 80))
        plan = Plan(gradients={"weight": Decision(codec="int8")}, num_ranks=4)
        sync = hipress.attach(model, plan=plan)
        assert "the plan was made for 4 ranks and this job has 1" in caplog.text
        sync.engine.close()
    finally:
        torch.distributed.destroy_process_group()
