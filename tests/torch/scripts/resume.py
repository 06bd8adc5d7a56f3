"""Runs `examples/resume_training.py` as it is, and may do it harm.

HARM holds JSON: {"step", "rank", "keep"}: at the end of this step this rank is killed, once, after
it has copied the last checkpoint to the folder `keep`; {"forget": true}: what the codec remembers
is not loaded. With `agent` in front of the arguments they are torchrun's; its host then tells which
processes it has left.
"""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "resume_training.py"


def tell(**line):
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def agent(arguments):
    """Runs torchrun; who is alive on this host afterwards?"""
    before = processes()
    code = subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments]).returncode
    tell(left=sorted(processes() - before))
    return code


def processes():
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def worker():
    import torch

    import hipress.torch

    harm = json.loads(os.environ.get("HARM", "{}"))
    rank, count = int(os.environ["RANK"]), 0
    tell(began=time.monotonic(), rank=rank)

    class Killing(torch.optim.SGD):
        def step(self):
            nonlocal count
            super().step()
            count += 1
            if (rank, count) != (harm.get("rank"), harm.get("step")):
                return
            # Not TORCHELASTIC_RESTART_COUNT: every host counts its own.
            if not os.path.exists(harm["keep"]):
                folder = sys.argv[sys.argv.index("--folder") + 1]
                shutil.copytree(folder, harm["keep"])
                tell(killed=time.monotonic(), rank=rank)
                os.kill(os.getpid(), signal.SIGKILL)

    torch.optim.SGD = Killing
    if harm.get("forget"):
        load = hipress.torch.Sync.load_state_dict
        hipress.torch.Sync.load_state_dict = lambda self, state: load(
            self, {**state, "gradients": {}}
        )
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        sys.exit(agent(sys.argv[2:]))
    worker()
