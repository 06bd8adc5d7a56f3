"""Many gradients in one frame, and the frames of workers merged into one."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import hipress
from hipress.codecs import frame
from hipress.errors import FrameError, UsageError
from tests.codecs.generic import Feedback

NUMELS = (100, 7, 1, 4096, 5001)
CODECS = ("none", "int8", "onebit", "terngrad", "dithering", "topk", "randomk", "dgc")


def flat_of(bulk, seed=0):
    torch.manual_seed(seed)
    return torch.randn(bulk.numel)


@pytest.mark.parametrize("name", CODECS)
def test_a_bulk_is_its_gradients_one_by_one(name):
    codec = hipress.codec(name)
    bulk = codec.bulk(NUMELS)
    flat = flat_of(bulk)
    state = bulk.init(flat, seed=5, stream=2)
    alone = [codec.init(view, seed=5 + k, stream=2) for k, view in enumerate(bulk.views(flat))]
    for step in range(2):
        flat = flat_of(bulk, step)
        payload = bulk.encode(flat, state)
        assert payload.numel() == bulk.wire_bytes
        header, bodies = frame.read_frame(payload.numpy(), codec_hash=codec.codec_hash)
        assert header.step == (step if "step" in state else 0)
        out = torch.full((bulk.numel,), 9.0)
        bulk.decode(payload, out=out)
        total = bulk.decode(payload, out=out.clone(), add=True, alpha=0.5)
        rows = zip(bulk.views(flat), alone, bodies, bulk.views(out), bulk.views(total), strict=True)
        for view, own, body, decoded, added in rows:
            single = codec.encode(view, own)
            start = frame.frame_bytes([0])
            assert torch.equal(payload[body.offset : body.offset + body.num_bytes], single[start:])
            assert torch.equal(decoded, codec.decode(single))
            assert torch.equal(
                added, codec.decode(single, out=decoded.clone(), add=True, alpha=0.5)
            )
    for key in state:
        if state[key].dim() == 1 and state[key].numel() == bulk.numel:
            held = [s[key] for s in alone]
            for view, want in zip(bulk.views(state[key]), held, strict=True):
                assert torch.equal(view, want)


def test_what_lies_between_gradients_is_left_alone():
    bulk = hipress.codec("onebit").bulk([3, 5])
    flat = torch.zeros(bulk.numel)
    payload = bulk.encode(flat, bulk.init(flat))
    out = torch.full((bulk.numel,), 7.0)
    bulk.decode(payload, out=out)
    assert (out[3:16] == 7).all() and (out[21:] == 7).all()


def test_one_bad_number_flags_the_frame():
    bulk = hipress.codec("onebit").bulk([100, 100])
    flat = torch.randn(bulk.numel)
    bulk.views(flat)[1][3] = float("nan")
    payload = bulk.encode(flat, bulk.init(flat))
    out = bulk.decode(payload, out=torch.zeros(bulk.numel))
    assert all(view.isnan().all() for view in bulk.views(out))


@pytest.mark.parametrize(
    "numels, why",
    [
        ([], "bulk was given 0 gradients; it takes 1 to 1048576."),
        ([10, 0, 4096], "numels[1] is 0; each gradient must have at least one element"),
        (5, "bulk was given a int; it takes the number of elements of each gradient"),
        (torch.tensor([5]), "bulk was given a Tensor; it takes the number of elements"),
        ([torch.zeros(5)], "numels[0] is a tensor; it must be a whole number."),
        ([8, 1.5], "numels[1] is 1.5; it must be a whole number."),
    ],
)
def test_a_bulk_of_nothing_is_refused(numels, why):
    with pytest.raises(UsageError, match=re.escape(why)):
        hipress.codec("onebit").bulk(numels)


def test_numbers_of_numpy_are_numbers():
    assert hipress.codec("onebit").bulk(np.array([10, 20])).numels == (10, 20)


def test_a_wrapper_that_is_not_fused_has_no_bulk():
    with pytest.raises(UsageError, match="takes one gradient at a time"):
        Feedback(hipress.codec("terngrad")).bulk([10])


def test_what_does_not_fit_is_refused():
    codec = hipress.codec("onebit")
    bulk = codec.bulk([100, 200])
    flat = torch.zeros(bulk.numel)
    state = bulk.init(flat)
    payload = bulk.encode(flat, state)
    with pytest.raises(UsageError, match="this bulk needs one dimension of"):
        bulk.encode(torch.zeros(300), state)
    with pytest.raises(UsageError, match="encode needs .* contiguous bytes"):
        bulk.encode(flat, state, out=torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(FrameError, match="this bulk needs"):
        bulk.decode(payload[:-16], out=flat)
    for call in (bulk.init, bulk.encode, lambda x: bulk.decode(payload, out=x)):
        with pytest.raises(UsageError, match="is a list; a bulk takes one tensor with all"):
            call([flat])
    with pytest.raises(UsageError, match="alpha is 'x'; it must be one number"):
        bulk.decode(payload, out=flat, alpha="x")
    with pytest.raises(UsageError, match="seed is 'a'; it must be a whole number"):
        bulk.init(flat, seed="a")
    with pytest.raises(FrameError, match=r"decode it with codec.bulk\(\[...\]\).decode"):
        codec.decode(payload)
    swapped = codec.bulk([200, 100])
    other = swapped.encode(torch.zeros(swapped.numel), swapped.init(torch.zeros(swapped.numel)))
    with pytest.raises(FrameError):
        bulk.decode(other, out=flat)


@pytest.mark.parametrize("name", CODECS)
def test_merge_is_decode_add_encode(name):
    codec = hipress.codec(name)
    back = codec.aggregator(3)
    n = 5001
    xs = [torch.randn(n) for _ in range(3)]
    shared = codec.shares_stream
    frames = [codec.encode(x, codec.init(x, stream=0 if shared else k)) for k, x in enumerate(xs)]
    mean = torch.zeros(n)
    for payload in frames:
        codec.decode(payload, out=mean, add=True, alpha=1 / 3)
    want_state, state = (back.init(mean, seed=4) for _ in range(2))
    want = back.encode(mean, want_state)
    assert torch.equal(back.merge(frames, codec, n, state), want)
    for key in state:
        assert torch.equal(state[key], want_state[key])


def test_merging_nothing_is_refused():
    codec = hipress.codec("onebit")
    with pytest.raises(UsageError, match="merge was given no frame; give a list of at least one."):
        codec.merge([], codec, 100, codec.init(torch.zeros(100)))


def test_a_merge_takes_frames_a_codec_a_number_and_a_state():
    codec = hipress.codec("onebit")
    back, x = codec.aggregator(2), torch.randn(100)
    payload = codec.encode(x, codec.init(x))
    state = back.init(x)
    order = re.escape("merge(payloads, worker, numel, state).")
    refused = (
        ((payload, codec, 100, state), "merge was given one Tensor as payloads; it takes a list"),
        ((5, codec, 100, state), "merge was given one int as payloads; it takes a list"),
        (([payload], "onebit", 100, state), f"a str as worker; it takes the codec .*{order}"),
        (([payload], 100, state), f"a int as worker; it takes the codec .*{order}"),
        (([payload], codec, state), f"a state in place of the number of elements; call {order}"),
        (([payload], codec, 1.5, state), "the number of elements is 1.5; it must be a whole"),
        (([payload], codec, 5000, state), "frame 0 has 112 bytes on cpu; for numel=5000 elements"),
        (([payload], codec, 101, state), "frame 0 does not hold numel=101 elements"),
        (([payload], codec, 100), f"onebit keeps state; .* pass it: c.{order}"),
    )
    for arguments, why in refused:
        with pytest.raises((UsageError, FrameError), match=why):
            back.merge(*arguments)
    with pytest.raises(UsageError, match="alpha is 'x'"):
        back.merge([payload], codec, 100, state, alpha="x")
    assert not state["residual"].any()
    # An aggregator of two takes three frames too.
    assert back.merge([payload] * 3, codec, 100, state).numel() == back.wire_bytes(100)
