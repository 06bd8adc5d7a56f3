"""Hosts, variables and torchrun's arguments: what is read, what is refused, in one sentence."""

import json

import pytest

from hipress.environment import with_defaults
from hipress.errors import UsageError
from hipress.launch import torchrun
from hipress.launch.hosts import Host, parse_hosts, read_hosts
from hipress.launch.remote import next_step, ssh_command


@pytest.fixture
def hosts_file(tmp_path):
    def write(content):
        path = tmp_path / "hosts.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_hosts_of_the_command_line():
    assert parse_hosts("node1, me@node2:4,[fe80::1]:2,10.0.0.1") == (
        Host(name="node1"),
        Host(name="node2", user="me", slots=4),
        Host(name="fe80::1", slots=2),
        Host(name="10.0.0.1", slots=1),
    )


def test_hosts_of_a_file(hosts_file):
    entry = {"host": "c", "slots": 2, "ssh_port": 22222, "user": "me", "address": "10.0.0.3"}
    assert read_hosts(hosts_file(["a", "b:4", entry])) == (
        Host(name="a"),
        Host(name="b", slots=4),
        Host(name="c", slots=2, ssh_port=22222, user="me", address="10.0.0.3"),
    )
    assert Host(name="a").address == "a"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "hosts '' has an empty name"),
        ("a,,b", "hosts 'a,,b' has an empty name"),
        ("a:0", "host a has 0 slots; it must have from 1 to 1024"),
        ("a:x", "host 'a:x' has slots 'x', which is not a whole number; write a:4"),
        ("a:-1", "has slots '-1'"),
        ("a:", "has slots ''"),
        ("a,a:2", "host a is there twice"),
        ("node1,NODE1.", "host NODE1. is there twice"),
        ("[fe80::1],[FE80:0::1]", "host FE80:0::1 is there twice"),
        ("-oProxyCommand=x", "host '-oProxyCommand=x' is neither a name nor an address"),
        ("a b", "host 'a b' is neither a name nor an address"),
        ("-x@a", "user '-x' of host a is not one; write e.g. me@a."),
        ("localhost,b", "the first host is localhost, which the other hosts cannot reach"),
        ("LocalHost.,b", "the first host is LocalHost., which"),
        ("127.1,b", "the first host is 127.1, which"),
        ("[0:0::1],b", "the first host is 0:0::1, which"),
        ("[::ffff:127.0.0.1],b", "the first host is ::ffff:127.0.0.1, which"),
        ("0.0.0.0,b", "the first host is 0.0.0.0, which"),
    ],
)
def test_hosts_that_are_refused(text, says):
    with pytest.raises(UsageError) as caught:
        parse_hosts(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "there is no host in the list"),
        ({}, "holds no list"),
        ("[", "is not JSON"),
        ([1], "entry 1 of the hosts file is neither a name nor an object"),
        ([{"slots": 2}], 'is neither a name nor an object with "host"'),
        (
            [{"host": "a", "slot": 2}],
            "field 'slot' of host 'a' is unknown; choose from host, slots",
        ),
        ([{"host": "a", "slots": "2"}], "field 'slots' of host 'a' is \"2\"; it must be a whole"),
        ([{"host": "a", "slots": True}], "it must be a whole number"),
        ([{"host": "a", "ssh_port": 0}], "the ssh port of host a is 0; it must be from 1 to 65535"),
        ([{"host": 7}], "field 'host' of host 7 is 7; it must be a text"),
        (["a", {"host": "a"}], "host a is there twice"),
    ],
)
def test_files_that_are_refused(hosts_file, content, says):
    with pytest.raises(UsageError) as caught:
        read_hosts(hosts_file(content))
    assert says in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot be read .No such file or directory.; give"):
        read_hosts(tmp_path / "none.json")


def test_what_is_forwarded():
    environ = {"HIPRESS_LOG": "debug", "A": "1", "B": "2", "C": "3"}
    assert torchrun.forwarded(["A", "B=4=5", "D="], "eth0", environ) == {
        "HIPRESS_LOG": "debug",
        "A": "1",
        "B": "4=5",
        "D": "",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    assert torchrun.forwarded([], None, {"A": "1"}) == {}


@pytest.mark.parametrize(
    ("wanted", "interface", "says"),
    [
        (["A"], None, "--env A asks for a variable that is not set here; export it first"),
        (["=x"], None, "--env '=x' has no name of a variable"),
        (["A B=x"], None, "--env 'A B=x' has no name of a variable"),
        ([], "", "--interface '' is not the name of a network card"),
        ([], "eth0;x", "--interface 'eth0;x' is not the name of a network card"),
    ],
)
def test_what_cannot_be_forwarded(wanted, interface, says):
    with pytest.raises(UsageError) as caught:
        torchrun.forwarded(wanted, interface, {})
    assert says in str(caught.value)


def test_defaults_give_way_to_what_is_set():
    def defaults(environ, one_thread=True):
        return with_defaults(environ, python_folder="/py", one_thread=one_thread)

    whole = defaults({"PATH": "/bin"})
    assert whole["OMP_NUM_THREADS"] == whole["PYTHONUNBUFFERED"] == "1"
    assert whole["PATH"] == "/py:/bin"
    whole = defaults({"OMP_NUM_THREADS": "3", "A": "b"})
    assert (whole["OMP_NUM_THREADS"], whole["A"], whole["PATH"]) == ("3", "b", "/py")
    assert "OMP_NUM_THREADS" not in defaults({}, one_thread=False)


def node(**more):
    values = dict(index=1, num_nodes=3, slots=2, job_id="j", max_restarts=0)
    return torchrun.Node(**{**values, "master_addr": "n1", "master_port": 5, **more})


def test_torchrun_without_restarts_is_told_the_order_of_hosts():
    argv = torchrun.command_line(node(), "socket", ["python", "train.py", "--max-restarts"], "/l")
    assert argv[-4:] == ["socket", "python", "train.py", "--max-restarts"]
    for option in ("--node-rank=1", "--rdzv-backend=static", "--rdzv-endpoint=n1:5", "--nnodes=3"):
        assert option in argv


def test_torchrun_with_restarts_sorts_hosts_as_they_were_given():
    def label(index, master_addr):
        argv = torchrun.command_line(
            node(index=index, max_restarts=1, master_addr=master_addr), "socket", ["x"], "/l"
        )
        assert f"--rdzv-conf=is_host={int(index == 0)}" in argv
        (option,) = (word for word in argv if word.startswith("--local-addr="))
        return option.partition("=")[2]

    for master_addr in ("zebra", "Zebra", "10.0.0.1", "_z", "fe80::1"):
        labels = [label(index, master_addr) for index in range(12)]
        assert labels == sorted(labels)
        assert labels[0] == master_addr


def test_torchrun_on_this_machine_needs_no_port():
    argv = torchrun.command_line(node(master_addr="", master_port=0), "socket", ["x"], "/l")
    assert "--rdzv-backend=hipress" in argv
    assert "from hipress.launch.standalone import main" in argv[2]
    assert "--rdzv-endpoint=127.0.0.1:0" in argv


def test_the_command_of_ssh():
    host = Host(name="n1", user="me")
    argv = ssh_command(host, ssh=["ssh", "-i", "key"], port=2222, python="/a b/python")
    assert argv[:4] == ["ssh", "-i", "key", "-T"]
    assert argv[-4:-1] == ["-p", "2222", "me@n1"]
    assert argv[-1] == (
        "exec '/a b/python' -c 'import sys; sys.path[:] = filter(None, sys.path); "
        "from hipress.launch.agent import main; main()'"
    )
    assert "BatchMode=yes" in argv
    own = Host(name="n1", ssh_port=3)
    assert ssh_command(own, ssh=["ssh"], port=2222, python="p")[-3] == "3"


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ("me@n1: Permission denied (publickey).", "without a password: ssh-copy-id me@n1"),
        ("Host key verification failed.", "accept its key once by hand: ssh -p 7 me@n1 true"),
        ("ssh: Could not resolve hostname n1: ...", "check the name, or use its address"),
        ("connect to host n1 port 22: Connection refused", "is sshd running there"),
        ("connect to host n1 port 22: Connection timed out", "is it up, and is the port"),
        ("something new", "try it by hand: ssh -p 7 me@n1 true"),
    ],
)
def test_the_next_step_when_ssh_fails(said, step):
    assert step in next_step(Host(name="n1", user="me"), said, ssh=["ssh"], port=7)
