"""Signals for a whole family, in which one may belong to somebody else."""

import os
import signal
import subprocess

from hipress.processes import family


def test_one_that_may_not_be_signalled_does_not_save_the_others(monkeypatch):
    programs = [subprocess.Popen(["sleep", "300"]) for _ in range(3)]
    others = programs[1].pid
    kill = os.kill

    def refuse(pid, number):
        if pid == others:
            raise PermissionError
        kill(pid, number)

    # Only these: the process that runs the tests may have other children.
    monkeypatch.setattr(family, "descendants", lambda _: [p.pid for p in programs])
    monkeypatch.setattr(os, "kill", refuse)
    assert family.signal_descendants(signal.SIGTERM) == [others]
    monkeypatch.undo()
    programs[1].kill()
    assert [program.wait(60) for program in programs] == [-15, -9, -15]
