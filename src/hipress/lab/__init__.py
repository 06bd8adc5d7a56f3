"""The lab room: an emulated cluster on one machine, with hosts of their own and shaped links.

    with Lab(hosts=4, rate="1gbit") as lab:
        finished = lab.run([sys.executable, "train.py"])

From the outside in: `lab.py` (what a user holds), `run.py` (one command on all ranks), `cluster.py`
(the lab's side of its processes), `switch.py` (the process that holds all together), `agent.py`
(init of one host), `network.py` (bridge, links, shaping; delay and loss where the kernel has no
netem), `links.py` (what a link is), `namespaces.py` (system calls).
"""

from hipress.lab.lab import Lab
from hipress.lab.links import Counters
from hipress.lab.run import CommandRun, Finished

Job = CommandRun
"""The former name of `CommandRun`."""

__all__ = ["CommandRun", "Counters", "Finished", "Job", "Lab"]
