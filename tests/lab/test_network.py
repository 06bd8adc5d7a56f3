"""The network of an emulated cluster, measured: rates, delay, loss, counters, cut links."""

import statistics
import sys
import time

import pytest

from hipress.errors import LabError
from hipress.lab import Lab
from tests.grid import full, thinned

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("namespaces")]

# TCP/IP and Ethernet headers take 4.4 % of a full packet of 1514 bytes; the bucket may be full.
LEAST, MOST = 0.85, 1.0


def mbits(finished, rank=1):
    return [float(line) for line in finished.stdout[rank].split()]


def usual(finished):
    """Return the median: this machine may stand still in one of three rounds."""
    return statistics.median(mbits(finished))


@pytest.mark.parametrize(("rate", "mbit", "size"), [("1gbit", 1000, 30e6), ("100mbit", 100, 5e6)])
def test_a_link_has_its_rate(rate, mbit, size, move):
    with Lab(2, rate=rate) as lab:
        measured = usual(lab.run(move(int(size), 3), timeout=30, check=True))
    assert LEAST * mbit <= measured <= MOST * mbit


# The sender's link, the receiver's link.
@pytest.mark.parametrize("slow", thinned([0, 1], keep=(1,)))
def test_a_slow_host_among_fast_ones(slow, move):
    rates = ["1gbit", "1gbit"]
    rates[slow] = "100mbit"
    with Lab(2, rate=rates) as lab:
        measured = usual(lab.run(move(5_000_000, 3), timeout=30, check=True))
    assert LEAST * 100 <= measured <= MOST * 100 * 1.03  # the first packets leave at once


def test_a_link_without_a_rate_is_not_shaped(move):
    with Lab(2) as lab:
        measured = mbits(lab.run(move(100_000_000, 3), timeout=30, check=True))
    assert max(measured) > 1500


def test_the_rate_changes_while_a_job_runs(move):
    rates = iter([None, None, "50mbit", None, None, "400mbit", None, None, None])

    def on_line(rank, stream, line):
        if (rate := next(rates)) is not None:  # while the next round has begun
            lab.set_rate(0, rate)

    with Lab(2, rate=["200mbit", "none"]) as lab:
        finished = lab.run(move(4_000_000, 9), on_line=on_line, timeout=30, check=True)
    found = mbits(finished)
    for k, mbit in enumerate((200, 50, 400)):
        assert LEAST * mbit <= statistics.median(found[3 * k : 3 * k + 3]) <= 1.05 * mbit


def test_delay_is_met_once_each_way(ping):
    with Lab(2, rate="1gbit", delay="5ms") as lab:
        times = mbits(lab.run(ping(20), timeout=30, check=True), rank=0)
        assert 9 <= statistics.median(times) <= 15
        lab.set_link(0, delay="none")
        times = mbits(lab.run(ping(20), timeout=30, check=True), rank=0)
        assert 4.5 <= statistics.median(times) <= 9  # host 1 delays still


def test_without_delay_there_is_none(ping):
    with Lab(2, rate="1gbit") as lab:
        times = mbits(lab.run(ping(20), timeout=30, check=True), rank=0)
    assert statistics.median(times) < 2


def test_a_delay_that_can_not_come_later_is_told(ping):
    with Lab(2, rate="1gbit") as lab:
        try:
            lab.set_link(0, delay="5ms")
        except LabError as error:  # a kernel without netem
            assert "this kernel has no netem" in str(error)
            assert "make the lab with a delay or a loss" in str(error)
            least, most = 0, 2
        else:
            least, most = 4.5, 9
        times = mbits(lab.run(ping(20), timeout=30, check=True), rank=0)
        assert least <= statistics.median(times) <= most


@full
def test_delay_does_not_cost_rate(move):
    with Lab(2, rate="200mbit", delay="2ms") as lab:
        measured = mbits(lab.run(move(10_000_000, 4), timeout=30, check=True))
    assert LEAST * 200 <= statistics.median(measured[1:]) <= 1.05 * 200


# Rank 0 asks until rank 1 has answered, so that the first packets, of ARP too, may get lost, and so
# that no more packets wait than a socket holds.
LOSE = """
import os, socket, time
sock = socket.socket(type=socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
if os.environ["RANK"] == "1":
    sock.bind(("", 5002))
    count = 0
    while True:
        data, peer = sock.recvfrom(100)
        if data == b"stop":
            break
        count += data == b"x"
        if data == b"?":
            sock.sendto(b"!", peer)
    print(count)
else:
    sock.settimeout(0.1)
    def ask():
        for _ in range(100):
            sock.sendto(b"?", ("host1", 5002))
            try:
                return sock.recv(100)
            except (TimeoutError, ConnectionRefusedError):
                time.sleep(0.02)
    for at in range(2000):
        if at % 50 == 0:
            ask()
        sock.sendto(b"x", ("host1", 5002))
    ask()
    for _ in range(20):
        time.sleep(0.01)
        sock.sendto(b"stop", ("host1", 5002))
"""


@full
def test_loss_loses_its_part(python):
    with Lab(2, loss="20%") as lab:
        (arrived,) = mbits(lab.run(python(LOSE), timeout=30, check=True))
    # 2000 packets at 0.8: a mean of 1600 with a deviation of 18; five of them each way.
    assert 1510 <= arrived <= 1690


def test_counters_count_what_was_sent(move):
    size = 20_000_000
    with Lab(3, rate="1gbit") as lab:
        before = [lab.counters(host) for host in range(3)]
        lab.run(move(size), timeout=30, check=True)
        after = [lab.counters(host) for host in range(3)]
    sent = [now.sent_bytes - then.sent_bytes for now, then in zip(after, before, strict=True)]
    received = [
        now.received_bytes - then.received_bytes for now, then in zip(after, before, strict=True)
    ]
    assert size <= sent[0] <= 1.05 * size
    assert received[1] == pytest.approx(sent[0], rel=0.05)
    assert sent[1] < 0.05 * size  # acknowledgements
    assert max(sent[2], received[2]) < 10_000
    assert after[0].sent_packets > before[0].sent_packets
    assert after[1].received_packets > before[1].received_packets


@pytest.mark.parametrize("delay", thinned([None, "1ms"], keep=(None,)))
def test_a_cut_link_is_silent_and_heals(delay, ping):
    at = []
    with Lab(2, rate="1gbit", delay=delay) as lab:
        job = lab.start(ping(1_000_000), on_line=lambda *_: at.append(time.monotonic()))
        while len(at) < 10:
            time.sleep(0.01)
        lab.cut(1)
        until, count = time.monotonic() + 20, -1
        while count != len(at):  # lines that are on their way
            assert time.monotonic() < until
            count = len(at)
            time.sleep(1)
        assert job.poll() is None  # nobody was told
        lab.heal(1)
        healed = time.monotonic()
        while len(at) <= count + 10:
            assert time.monotonic() - healed < 40
            time.sleep(0.01)
        job.kill()


@full
def test_shaping_of_torch_itself(python):
    code = (
        "import statistics, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "times = []\n"
        "for _ in range(5):\n"
        "    x = torch.ones(2_500_000)\n"
        "    dist.all_reduce(x[:10]); start = time.perf_counter()\n"
        "    dist.all_reduce(x[10:])\n"
        "    times.append(time.perf_counter() - start)\n"
        "print(x[-1].item(), statistics.median(times))\n"
        "dist.destroy_process_group()"
    )
    with Lab(2, rate="1gbit") as lab:
        finished = lab.run([sys.executable, "-c", code], timeout=60, check=True)
    for text in finished.stdout:
        total, seconds = map(float, text.split())
        assert total == 2
        # A ring of two sends each element once: 10 MB take 80 ms.
        assert 0.07 <= seconds <= 0.3
