"""Models and sessions that are dropped take their engines, threads and buffers with them."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
import hipress.session
import hipress.torch
from hipress.casync.engine.engine import Engine

pytestmark = pytest.mark.alone


def with_hook():
    model = DDP(nn.Linear(64, 64))
    model.register_comm_hook(*hipress.torch.comm_hook("onebit"))
    return model


def attached(**options):
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))
    hipress.attach(model, **options)
    return model


def train(model):
    for _ in range(3):
        model(torch.randn(8, 64)).sum().backward()


def in_a_loop():
    weight = torch.randn(64, 64)
    session = hipress.session.start({"weight": weight}, codec="onebit", min_size=0)
    for _ in range(3):
        session.average({"weight": weight})


KINDS = {
    "comm_hook": lambda: train(with_hook()),
    "attach": lambda: train(attached(codec="onebit")),
    "auto": lambda: train(attached()),
    "a hand-written loop": in_a_loop,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_dropped_ends(kind):
    """Catches: threads and buffers that pile up in a program that makes one model after another."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        num_engines, threads = alive()
        for _ in range(4):
            KINDS[kind]()
        # What another test has left behind may end meanwhile, and a thread that is ending may still
        # hold the last engine.
        deadline = time.monotonic() + 20
        while True:
            num_left, left = alive()
            is_over = num_left <= num_engines and not left - threads
            if is_over or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert is_over, (num_left, left)
    finally:
        dist.destroy_process_group()


def alive():
    """Number of engines, and the threads of HiPress."""
    gc.collect()
    threads = {one for one in threading.enumerate() if one.name.startswith("hipress-")}
    return sum(type(one) is Engine for one in gc.get_objects()), threads
