"""Every example once an epoch, whoever takes it, and the same again after a resume."""

import pytest
import torch

from hipress.errors import UsageError
from hipress.train.batches import Sampler, mix


def samplers(num_ranks, *, num_examples=103, batch=5, seed=0):
    return [
        Sampler(num_examples=num_examples, batch=batch, rank=r, num_ranks=num_ranks, seed=seed)
        for r in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_an_epoch_deals_each_example_at_most_once(num_ranks):
    ranks = samplers(num_ranks)
    per_epoch = 103 // (5 * num_ranks)
    assert ranks[0].steps_per_epoch == per_epoch
    for epoch in (0, 1, 5):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        dealt = torch.cat([rank.indices(step) for step in steps for rank in ranks]).tolist()
        assert len(dealt) == len(set(dealt)) == per_epoch * 5 * num_ranks
        assert min(dealt) >= 0 and max(dealt) < 103


def test_the_order_is_another_in_every_epoch_and_with_every_seed():
    (one,), (other,) = samplers(1), samplers(1, seed=1)
    assert one.indices(0).tolist() != one.indices(one.steps_per_epoch).tolist()
    assert one.indices(0).tolist() != other.indices(0).tolist()


def test_it_follows_from_the_step_alone():
    (one,) = samplers(1)
    later = [one.indices(step).tolist() for step in (70, 3, 70)]
    (again,) = samplers(1)
    assert later == [again.indices(step).tolist() for step in (70, 3, 70)]


def test_ranks_together_take_what_one_rank_with_their_batch_would():
    (whole,) = samplers(1, batch=20)
    parts = samplers(4, batch=5)
    for step in (0, 4, 9):
        dealt = torch.cat([rank.indices(step) for rank in parts])
        assert torch.equal(dealt, whole.indices(step))


def test_seeds_differ_by_step_and_rank_and_are_the_same_everywhere():
    found = {rank.seed_of(step) for rank in samplers(4) for step in range(50)}
    assert len(found) == 200 and all(0 <= seed < 2**63 for seed in found)
    # A number that was written down: a release that draws others could not resume older runs.
    assert mix(0, 1, 2) == 5458876493991123480


def test_too_few_examples():
    with pytest.raises(
        UsageError,
        match=r"4 rank\(s\) with --batch 5 take 20 examples in a step "
        r"and the data has 13; give --batch 3 or less, or fewer ranks\.",
    ):
        samplers(4, num_examples=13)[0].check()


def test_advice_counts_batches_as_the_user_does():
    one = Sampler(num_examples=1200, batch=1600, rank=0, num_ranks=1, seed=0)
    with pytest.raises(UsageError, match=r"--batch 400 and --accumulate 4 take 1600 .* 300 or"):
        one.check(accumulate=4)
    with pytest.raises(UsageError, match=r"the data has 3; give fewer ranks\."):
        samplers(4, num_examples=3)[0].check()
