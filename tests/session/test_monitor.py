"""Where the time of steps goes: what is counted, kept, written and served."""

import gc
import http.client
import json
import logging
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from hipress import environment, session, snapshots
from hipress.casync.engine.executors import BusyTime
from hipress.session import monitor, monitor_server
from hipress.session.monitor import History, Totals
from tests.scenarios import free_ports

CODED = {f"w{k}": torch.ones(64, 64) for k in range(3)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "hipress"


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def often(monkeypatch):
    """A snapshot in every step."""
    monkeypatch.setattr(monitor, "EVERY_S", 0.0)


def started(**options):
    return session.start(CODED, codec="onebit", **options)


def steps(run, count):
    for _ in range(count):
        run.average(CODED)


# --- what is counted ------------------------------------------------------------------------------


def test_time_side_by_side_counts_once(monkeypatch):
    """Catches: a sum over threads that is longer than the step."""
    now = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    busy = BusyTime()
    moments = {10: busy.begin, 20: busy.begin, 50: busy.end, 70: busy.end, 80: busy.begin}
    for now, call in moments.items():  # noqa: B007  # the clock reads it
        call()
    now = 85
    assert busy.read_ns() == 60 + 5


def test_a_step_is_compute_and_wait_and_its_exchange_the_three_others(alone, folder, often):
    """Catches: parts that overlap or leave a gap, times of the first step, other units."""
    run = started()
    steps(run, 4)
    time.sleep(0.05)  # data, or an optimizer
    before = run.monitor.totals
    steps(run, 1)
    split = run.monitor.totals.since(before).split()
    assert split.step_s == pytest.approx(split.compute_s + split.wait_s)
    assert split.compute_s >= 0.05
    assert 0 < split.encode_s and 0 < split.decode_s and 0 <= split.wire_s
    assert split.encode_s + split.wire_s + split.decode_s <= split.wait_s + 0.01
    assert run.monitor.totals.num_steps + run.monitor.setup_steps == 5
    assert run.monitor.setup_steps >= 1 and run.monitor.setup_ns > 0


def test_steps_that_set_up_an_exchange_are_counted_apart(alone, folder):
    """Catches: seconds of a compiler in the mean of steps of milliseconds."""
    run = started()
    steps(run, 3)
    counted = run.monitor.totals
    run.engine.allreduce([torch.ones(5)], codec="none").wait()
    steps(run, 1)
    assert run.monitor.totals == counted and run.monitor.setup_steps == 2
    run.monitor.note_measuring(run)
    steps(run, 1)
    assert run.monitor.totals == counted and run.monitor.setup_steps == 3
    steps(run, 1)
    assert run.monitor.totals.num_steps == counted.num_steps + 1


def test_a_history_is_bounded_and_loses_no_time():
    """Catches: memory that grows with the run, points that are not evenly spread."""
    history, totals = History(max_points=10), Totals()
    size = None
    for step in range(1, 5001):
        totals = Totals(*(a + b for a, b in zip(totals, range(1, 9), strict=True)))
        history.add(step, totals)
        size = size or len(history._values)
        assert len(history._values) == size
    points = history.points()
    assert 5 <= len(points) <= 10
    stride = points[1][0] - points[0][0]
    assert {b[0] - a[0] for a, b in zip(points, points[1:], strict=False)} == {stride}
    assert points[0][0] == stride and 5000 - points[-1][0] < stride
    assert all(totals == Totals(*(step * k for k in range(1, 9))) for step, totals in points)


def test_few_steps_are_all_in_a_history():
    history = History(max_points=4)
    for step in range(1, 5):
        history.add(step, Totals(step))
    assert [step for step, _ in history.points()] == [1, 2, 3, 4]


def test_events_are_bounded():
    """Catches: a run of months whose decisions fill the memory."""
    watched = monitor.Monitor()
    for step in range(1000):
        watched.note(step, "plan", "x" * 10_000)
    assert len(watched.events) == monitor.KEPT_EVENTS
    assert watched.events[-1].step == 999
    assert len(watched.events[0].text) == snapshots.MAX_TEXT


def test_scalars_have_the_split_since_the_last_ones(alone, folder):
    """Catches: scalars of the whole run, which hide that it has become slow."""
    told = []

    class Writer:
        def add_scalar(self, name, value, step):
            told.append((name.removeprefix("hipress/step_seconds/"), value, step))

    run = started(log_every=2, writer=Writer())
    steps(run, 3)
    time.sleep(0.05)
    steps(run, 1)
    seen = {name: value for name, value, step in told if step == 4}
    assert {"step", "compute", "encode", "wire", "decode", "wait"} <= set(seen)
    assert seen["step"] == pytest.approx(seen["compute"] + seen["wait"])
    assert 0.025 <= seen["step"]  # the mean of two steps, one with the pause


# --- snapshots ------------------------------------------------------------------------------------


def test_a_session_is_seen_while_it_lives(alone, folder, often):
    """Catches: no snapshot, one that outlives its session, one of another step."""
    run = started()
    steps(run, 3)
    (found,) = snapshots.read(folder)
    assert (found.rank, found.num_ranks, found.step) == (0, 1, 3)
    assert (found.pid, found.host, found.mode) == (os.getpid(), socket.gethostname(), "compressed")
    assert found.plan == "onebit (ps) for 3 of 3 gradients"
    assert found.split.num_steps == 1
    del run
    gc.collect()
    assert list(folder.iterdir()) == []


def test_a_snapshot_is_written_once_a_second(alone, folder, monkeypatch):
    """Catches: a system call in every step."""
    run = started()
    steps(run, 1)
    writes = []
    monkeypatch.setattr(snapshots.Writer, "write", lambda self, one: writes.append(one))
    now_ns = time.perf_counter_ns
    for ahead_s in (0, 0.5, 1.1, 1.2, 1.9, 2.3):
        monkeypatch.setattr(time, "perf_counter_ns", lambda s=ahead_s: now_ns() + int(1e9 * s))
        run.monitor.end_step(run)
    assert len(writes) == 2


def test_after_detach_nothing_is_shown(alone, folder, often):
    """Catches: a snapshot that stays at the last compressed step."""
    run = started()
    steps(run, 2)
    run.detach()
    steps(run, 1)
    assert list(folder.iterdir()) == []
    steps(run, 2)


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_folder_that_cannot_be_used_does_not_disturb(alone, folder, often, caplog, when,
                                                       monkeypatch):  # fmt: skip
    """Catches: a training run that ends, or a log that fills, because nobody can watch it."""
    caplog.set_level(logging.DEBUG, "hipress")
    if when == "at the start":
        folder.mkdir()
        folder.chmod(0o777)
    run = started()
    steps(run, 1)
    if when == "later":

        def full(self, one):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(snapshots.Writer, "write", full)
    steps(run, 3)
    assert run.step == 4 and list(folder.iterdir()) == []
    lines = [one.getMessage() for one in caplog.records if "hipress top" in one.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("hipress top will not show rank 0: ")
    reason = "can be written by others" if when == "at the start" else "No space left on device"
    assert reason in lines[0]


@pytest.mark.alone
def test_steps_and_snapshots_cost_little(alone, folder, monkeypatch):
    """Catches: a monitor that costs more than a small exchange; it was 3 and 32 us."""
    run = started()
    steps(run, 3)
    watched = run.monitor
    for step in range(20):
        watched.note(step, "plan", "int8 with ps: 4.2 ms a step against 12 ms plain " * 2)

    def least_us():
        found = []
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(50):
                watched.end_step(run)
            found.append((time.perf_counter() - begin) / 50 * 1e6)
        return min(found)

    assert least_us() < 25
    monkeypatch.setattr(monitor, "EVERY_S", 0.0)
    watched._publisher._due_ns = 0
    assert least_us() < 250


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
def port(monkeypatch):
    (found,) = free_ports(1)
    monkeypatch.setenv("HIPRESS_MONITOR", str(found))
    return found


def ask(port, method="GET", path="/"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_ranks_of_a_host_are_served(alone, folder, often, port):
    """Catches: other jobs or hosts in the answer, a socket on all cards, one that stays open."""
    run = started()
    steps(run, 2)
    mine = snapshots.read(folder)[0].model_dump()
    others = [snapshots.Writer(folder, "other", 0), snapshots.Writer(folder, mine["job"], 1)]
    others[0].write(mine | {"job": "other"})
    others[1].write(mine | {"rank": 1, "host": "another"})
    assert monitor_server._server.server_address == ("127.0.0.1", port)
    status, body = ask(port)
    told = json.loads(body)
    assert status == 200 and set(told) == {"hipress", "snapshots"}
    (one,) = told["snapshots"]
    assert one | {"age_s": 0} == json.loads(json.dumps(mine)) | {"age_s": 0}
    for method, path, wanted in (
        ("GET", "/x", 404), ("GET", "/?a=1", 404), ("GET", "/../etc", 404),
        ("HEAD", "/", 501), ("POST", "/", 501), ("PUT", "/", 501), ("DELETE", "/", 501),
        ("OPTIONS", "/", 501),
    ):  # fmt: skip
        assert ask(port, method, path)[0] == wanted, (method, path)
    for other in others:
        other.close()
    del run
    gc.collect()
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_two_models_share_a_port(alone, folder, often, port):
    """Catches: a second model that cannot listen, or whose end silences the first."""
    first, second = started(), started()
    steps(first, 1)
    steps(second, 1)
    assert len(json.loads(ask(port)[1])["snapshots"]) == 2
    del second
    gc.collect()
    assert len(json.loads(ask(port)[1])["snapshots"]) == 1


def test_a_silent_client_is_dropped(alone, folder, port, monkeypatch):
    """Catches: somebody who connects and says nothing, and so blinds all others."""
    monkeypatch.setattr(monitor_server._Handler, "timeout", 0.2)
    run = started()
    with socket.create_connection(("127.0.0.1", port)):
        assert ask(port)[0] == 200
    del run


def test_the_server_stops_without_waiting_for_a_client(port, monkeypatch):
    """Catches: training that stands still at its end because somebody reads slowly, and a garbage
    collection in the thread of the server that waits for this thread."""
    monkeypatch.setattr(monitor_server._Handler, "timeout", 1.0)
    stop = monitor_server.serve("job", is_first=True, one_host=True)
    (thread,) = [one for one in threading.enumerate() if one.name == "hipress-monitor"]
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"G")
        time.sleep(0.1)
        begin = time.monotonic()
        stop()
        assert time.monotonic() - begin < 0.5
        with pytest.raises(ConnectionRefusedError):
            ask(port)
        monitor_server.serve("next", is_first=True, one_host=True)()  # the port is free
    thread.join(10)
    assert not thread.is_alive()
    stopped = monitor_server.serve("job", is_first=True, one_host=True)
    monkeypatch.setattr(monitor_server._Handler, "_snapshots", lambda self: stopped() or b"own")
    assert ask(port) == (200, b"own")


def test_a_forked_process_ends_and_leaves_the_server_alone(port):
    """Catches: a worker that waits for a thread that it does not have, or holds the port."""
    stop = monitor_server.serve("job", is_first=True, one_host=True)
    gone, stay = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # ends it if it waits
        stop()
        os.write(stay, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.close(stay)
        assert os.read(gone, 1) == b"x"
        assert ask(port)[0] == 200
        stop()
        with pytest.raises(ConnectionRefusedError):
            ask(port)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(gone)


@pytest.mark.parametrize("kind", ["slow", "long"])
def test_a_client_that_never_ends_its_request_is_dropped(port, kind, monkeypatch, capfd):
    """Catches: a byte now and then that holds the server, a request that fills the memory, and
    tracebacks in the output of the training."""
    monkeypatch.setattr(monitor_server._Handler, "timeout", 0.5 if kind == "slow" else 60.0)
    stop = monitor_server.serve("job", is_first=True, one_host=True)
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(OSError):
        while time.monotonic() - begin < 5:
            client.sendall(b"G" if kind == "slow" else b"G" * 10_000)
            time.sleep(0.1)
    assert ask(port)[0] == 200
    stop()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_port_in_use_is_told_once_and_training_goes_on(alone, folder, port, caplog):
    """Catches: a job that ends because two of them share a host."""
    with socket.create_server(("127.0.0.1", port)):
        run = started()
        steps(run, 1)
    lines = [one.getMessage() for one in caplog.records]
    wanted = f"nothing is served at port {port}, which HIPRESS_MONITOR names"
    assert sum(wanted in line for line in lines) == 1


def test_nothing_listens_unless_asked_for(alone, folder):
    """Catches: a socket that nobody wanted, and one on a rank that is not the first."""
    run = started()
    assert monitor_server._server is None
    assert not [one for one in threading.enumerate() if one.name == "hipress-monitor"]
    del run


def test_only_the_first_rank_of_a_host_listens(port):
    monitor_server.serve("job", is_first=False, one_host=True)()
    assert monitor_server._server is None


def test_the_address_is_that_of_the_jobs_card():
    """Catches: a socket that strangers reach, on a card that the job does not use."""
    assert environment.job_address(one_host=True, environ={}) == "127.0.0.1"
    for name in environment.INTERFACE_VARIABLES:
        assert environment.job_address(one_host=False, environ={name: "lo"}) == "127.0.0.1"
    with pytest.raises(OSError):
        environment.job_address(one_host=True, environ={"GLOO_SOCKET_IFNAME": "no-such-card"})
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        pytest.skip("the name of this host has no address")
    assert environment.job_address(one_host=False, environ={}) == named


CARDS = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "wlan0": None, "eth10": "10.0.0.10",
         "eth1": "10.0.0.1"}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "one_host", "wanted"),
    [
        ("eth", False, "10.0.0.10"),
        ("eth1", False, "10.0.0.10"),
        ("=eth1", False, "10.0.0.1"),
        ("wlan,eth", False, "10.0.0.10"),
        ("^docker,lo", True, "10.0.0.10"),
        ("^docker", False, "10.0.0.10"),
        ("^docker", True, "127.0.0.1"),
        ("^=eth10,docker0", False, "10.0.0.1"),
        ("lo", False, "127.0.0.1"),
        ("wlan0", False, None),
        ("=eth", False, None),
    ],
)
def test_cards_are_named_as_for_nccl(monkeypatch, text, one_host, wanted):
    """Catches: a value of NCCL_SOCKET_IFNAME that is taken for the name of one card."""

    def address_of(card):
        if CARDS.get(card) is None:
            raise OSError(99, "Cannot assign requested address")
        return CARDS[card]

    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(CARDS, 1)))
    monkeypatch.setattr(environment, "_address_of", address_of)
    environ = {"NCCL_SOCKET_IFNAME": text}
    if wanted is None:
        with pytest.raises(OSError, match=f"fits NCCL_SOCKET_IFNAME={text}"):
            environment.job_address(one_host=one_host, environ=environ)
    else:
        assert environment.job_address(one_host=one_host, environ=environ) == wanted
        with pytest.raises(OSError):  # gloo knows names only
            environment.job_address(one_host=True, environ={"GLOO_SOCKET_IFNAME": "^docker0"})
