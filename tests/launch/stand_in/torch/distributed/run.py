"""What torchrun does for a job without restarts, as far as an agent can see it."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=int)
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--node-rank", type=int, default=0)
    for name in ("max-restarts", "rdzv-backend", "rdzv-id", "local-addr", "rdzv-endpoint"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.command[0] == "--":  # torchrun drops it too
        args.command.pop(0)
    return args


def main():
    args = arguments()
    (args.log_dir / "left-behind").touch()
    port = args.rdzv_endpoint.rpartition(":")[2]
    if port and args.node_rank == 0:
        with socket.create_server(("", int(port))) as server:
            for _ in range(args.nnodes - 1):
                server.accept()[0].close()  # no rank starts before all hosts are there
    first = args.node_rank * args.nproc_per_node
    children = [
        subprocess.Popen(
            args.command,
            start_new_session=True,
            env={
                **os.environ,
                "RANK": str(first + local_rank),
                "WORLD_SIZE": str(args.nnodes * args.nproc_per_node),
                "LOCAL_RANK": str(local_rank),
                "TORCHELASTIC_RESTART_COUNT": "0",
            },
        )
        for local_rank in range(args.nproc_per_node)
    ]

    def end(number, _):
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
        for child in children:
            child.wait()
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    while None in (codes := [child.poll() for child in children]) and not any(codes):
        time.sleep(0.02)
    if any(codes):
        print("torchrun: a page about a failure", file=sys.stderr, flush=True)
        end(0, None)
