"""The modes of a step: which transitions there are, and that no other is taken silently."""

import pytest

from hipress.session.mode import Mode, StepMode

TRANSITIONS = {
    "end_warmup": lambda mode: mode.end_warmup(),
    "use_plain": lambda mode: mode.use_plain(),
    "use_plan": lambda mode: mode.use_plan(),
    "try_plan": lambda mode: mode.try_plan(),
    "flush": lambda mode: mode.flush(then=Mode.DETACHED),
    "end_flush": lambda mode: mode.end_flush(),
    "restart": lambda mode: mode.restart(warm=True),
}
STEERED = {"use_plain": Mode.PLAIN, "use_plan": Mode.COMPRESSED, "try_plan": Mode.TRIAL}
ALLOWED = {
    Mode.PLAIN: {**STEERED, "flush": Mode.FLUSHING},
    Mode.WARMUP: {
        "end_warmup": Mode.COMPRESSED, "flush": Mode.FLUSHING, "restart": Mode.COMPRESSED,
    },
    Mode.COMPRESSED: {**STEERED, "flush": Mode.FLUSHING, "restart": Mode.COMPRESSED},
    Mode.TRIAL: {**STEERED, "flush": Mode.FLUSHING},
    Mode.FLUSHING: {"end_flush": Mode.PLAIN},
    Mode.DETACHED: {},
}  # fmt: skip


@pytest.mark.parametrize("first", Mode)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_every_transition_from_every_mode(first, name):
    """Catches: a detached session that compresses again, a flush that is skipped."""
    mode = StepMode(first)
    if name in ALLOWED[first]:
        TRANSITIONS[name](mode)
        assert mode.current is ALLOWED[first][name]
    else:
        with pytest.raises(AssertionError, match="no transition"):
            TRANSITIONS[name](mode)
        assert mode.current is first


def test_a_flush_ends_where_it_was_meant_to():
    """Catches: a detach that ends in plain steps of auto, or a switch of plans that detaches."""
    for then in (Mode.PLAIN, Mode.DETACHED):
        mode = StepMode(Mode.COMPRESSED)
        mode.flush(then=then)
        assert mode.is_leaving == (then is Mode.DETACHED)
        mode.end_flush()
        assert mode.current is then


def test_only_two_modes_compress():
    """Catches: a codec that works in a plain, warm-up, flushing or detached step."""
    assert {mode for mode in Mode if mode.compresses} == {Mode.COMPRESSED, Mode.TRIAL}
