"""The lab room: an emulated cluster on one machine, with hosts of their own and shaped links.

    with Lab(hosts=4, rate="1gbit") as lab:
        finished = lab.run([sys.executable, "train.py"])

From the outside in: `lab.py` (what a user holds), `job.py` (one command on all ranks), `wire.py`
(messages between processes), `switch.py` (the process that holds all together), `agent.py` (init
of one host), `network.py` (bridge, links, shaping), `relay.py` (delay and loss where the kernel
has no netem), `links.py` (what a link is), `system.py` (system calls).
"""

from hipress.lab.job import Finished, Job
from hipress.lab.lab import Lab
from hipress.lab.links import Counters

__all__ = ["Counters", "Finished", "Job", "Lab"]
