"""`hipress demo`: two trainings on an emulated cluster, a table, a picture; also without links."""

import json

import pytest

from hipress.bench.plots import LossCurve, draw_losses, smooth
from hipress.cli import demo as command
from hipress.cli.main import main
from hipress.cli.ui import demo_view
from hipress.errors import LabError
from tests.grid import full
from tests.scenarios import refusal

PNG = b"\x89PNG\r\n\x1a\n"


def run(*argv):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *argv])
    return stopped.value.code


@pytest.mark.alone
@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
@full
def test_the_demo(tmp_path, capsys):
    """Catches: a demo that does not speed up, learn, count bytes, or draw."""
    plot, out = tmp_path / "p.png", tmp_path / "o.json"
    assert run("--steps", "16", "--plot", str(plot), "--json", str(out)) == 0
    said = capsys.readouterr()
    assert "16 steps of cnn on digits, 4 hosts, 100mbit links" in said.out
    assert "uncompressed: starting" in said.err
    assert str(plot) in said.out and plot.read_bytes()[:8] == PNG
    plain, ours = json.loads(out.read_text())["rows"]
    assert (plain["codec"], ours["codec"]) == ("uncompressed", command.CODEC)
    assert plain["speedup"] == 1
    assert ours["speedup"] > 3
    assert plain["interface_bytes_per_step"] == pytest.approx(plain["wire_bytes_per_step"], rel=0.1)
    assert ours["interface_bytes_per_step"] < plain["interface_bytes_per_step"] / 10
    assert len(ours["curve"]) == 16 and ours["loss"] < 2.2 and plain["loss"] < 2.2


@pytest.mark.alone
@full
def test_without_links_it_says_so_and_ends_well(tmp_path, capsys, monkeypatch):
    """Catches: a traceback, or a non-zero exit, where a container forbids namespaces."""
    real = command._refusal
    assert real("1gbit") == refusal()

    def refused(*args, **kwargs):
        raise LabError("this system refuses a network namespace: Operation not permitted.")

    monkeypatch.setattr("hipress.lab.Lab", refused)
    assert "refuses a network namespace" in real("1gbit")
    monkeypatch.undo()
    monkeypatch.setattr(command, "_refusal", lambda rate: "this system refuses them.")
    plot = tmp_path / "p.png"
    assert run("--hosts", "2", "--steps", "10", "--plot", str(plot)) == 0
    said = capsys.readouterr()
    assert "Links cannot be emulated here: this system refuses them. Nothing is slow" in said.err
    assert "no emulated links" in said.out and plot.exists()


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--codec", "onebitt"], "did you mean 'onebit'?"),
        (["--rate", "fast"], "'fast'"),
        (["--plot", "x.pdf"], "--plot 'x.pdf' is not a PNG file; give a name that ends in .png."),
        (
            ["--plot", "no/such/x.png"],
            "No such file or directory; give --plot a file",
        ),
    ],
)
def test_refusals(argv, sentence, capsys):
    assert run(*argv) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and sentence in said[0], said


@pytest.mark.parametrize(
    "absent, named, command_line",
    [
        ({"pyroute2"}, "pyroute2 (emulated links)", "pip install pyroute2"),
        ({"matplotlib"}, "matplotlib (the picture)", "pip install matplotlib"),
        (
            {"scikit-learn", "pyroute2"},
            "pyroute2 (emulated links), scikit-learn (the data)",
            "pip install pyroute2 scikit-learn",
        ),
    ],
)
def test_missing_packages_are_named_before_any_work(
    absent, named, command_line, monkeypatch, capsys
):
    """Catches: a demo that trains for a minute and then lacks what draws its picture."""
    real = command.package_version
    monkeypatch.setattr(command, "package_version", lambda n: None if n in absent else real(n))
    monkeypatch.setattr("hipress.lab.Lab", lambda *args, **kwargs: pytest.fail("it has begun"))
    assert run() == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        f"hipress: the demo needs packages that are not installed: {named}; run `{command_line}` "
        "first.\n",
    )


def test_kernels_that_cannot_be_kept_are_told_before_any_work(monkeypatch, capsys, tmp_path):
    """Catches: a demo whose first training ends well and whose second cannot begin."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HIPRESS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("hipress.lab.Lab", lambda *args, **kwargs: pytest.fail("it has begun"))
    assert run("--codec", "int8(block=72)") == 2  # a program that no other test has loaded
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert "cannot write kernels to " in said.err and "set HIPRESS_CACHE_DIR" in said.err


def test_live_view(monkeypatch, capsys):
    """Catches: a view that shows nothing on a terminal, or everything where there is none."""
    start = {"kind": "start", "model": "cnn"}
    step = {"kind": "step", "step": 3, "loss": 0.25, "steps_per_s": 2.0, "time_s": 1.5}
    test = {"kind": "test", "step": 9, "accuracy": 97.5, "time_s": 4.0}
    with demo_view() as view:
        view.begin("onebit", 9)
        for row in (start, step, step, test):
            view.on_row("onebit", row, 9)
    assert capsys.readouterr().err.splitlines() == [
        "onebit: starting",
        "onebit: step 9/9 97.5 % right after 4 s",
    ]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with demo_view() as view:
        view.begin("onebit", 9)
        view.on_row("onebit", step, 9)
        (bar,) = view._progress.tasks
        assert (bar.completed, bar.total) == (3, 9)
        view.on_row("onebit", test, 9)
    shown = capsys.readouterr().err
    assert "9/9" in shown and "97.5 % right after 4 s" in shown


def test_picture(tmp_path):
    rows = [{"time_s": float(t), "loss": 2.0 / (1 + t)} for t in range(5)]
    curves = [LossCurve(label="one", rows=rows), LossCurve(label="no", rows=[])]
    draw_losses(tmp_path / "a.png", "title", curves)
    assert (tmp_path / "a.png").read_bytes()[:8] == PNG
    assert smooth([3.0]) == [pytest.approx(3.0)] and smooth([]) == []
    assert smooth([0.0, 1.0]) == pytest.approx([0.0, 0.3 / 0.51])
