"""Programs for the ranks of a lab, as text."""

# Rank 0 sends argv[1] bytes to rank 1, again and again argv[2] times; rank 1 prints mbit/s of each.
MOVE = """
import os, socket, sys, time
size, rounds = int(sys.argv[1]), int(sys.argv[2])
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5000)) as server:
        peer = server.accept()[0]
    for _ in range(rounds):
        left, start = size, None
        while left:
            left -= len(peer.recv(min(left, 1 << 18)))
            start = start or time.perf_counter()
        print(size * 8 / (time.perf_counter() - start) / 1e6, flush=True)
        peer.sendall(b"x")
elif os.environ["RANK"] == "0":
    def connect():
        while True:
            try:
                return socket.create_connection(("host1", 5000), timeout=10)
            except ConnectionRefusedError:
                time.sleep(0.02)
    peer = connect()
    peer.settimeout(None)
    for _ in range(rounds):
        peer.sendall(bytes(size))
        peer.recv(1)
"""

# Rank 1 answers; rank 0 prints the milliseconds of each of argv[1] round trips.
PING = """
import os, socket, sys, time
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5001)) as server:
        peer = server.accept()[0]
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while byte := peer.recv(1):
        peer.sendall(byte)
else:
    for _ in range(500):
        try:
            peer = socket.create_connection(("host1", 5001), timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(int(sys.argv[1])):
        start = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        print((time.perf_counter() - start) * 1e3, flush=True)
"""
