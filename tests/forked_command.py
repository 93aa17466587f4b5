"""Client of `tests/processes.py`: a command whose process is forked there, with the streams of this process."""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.environ["FORKED_COMMANDS"])
    request = json.dumps({"arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    pid = int.from_bytes(server.recv(8), "big")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int.from_bytes(server.recv(8), "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
