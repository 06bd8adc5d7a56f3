"""Kernels on several threads."""

import os
import signal
import warnings

import numpy as np

from hipress.compll.backends.threads import MIN_TILES, Runner


def test_a_forked_process_has_threads_of_its_own():
    """Catches: a kernel that waits for ever for threads that fork has left behind."""
    total = np.zeros(4 * MIN_TILES)

    def kernel(first, stop, *_):
        total[first:stop] += 1

    def run():
        Runner(2)([(kernel, 0, 1, -1)], (np.array([total.size, 0]),), 1)

    run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            run()
            os._exit(int(total.min()))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert total.max() == 1
