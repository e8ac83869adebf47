"""A real server for the tests: answers HTTP requests, forgets to give a thousandth of each back, and is watched.

``python server.py FOLDER ROOM_MIB [--leak SHARE] [--torch] [--hurry]`` prints its port; its limit is ROOM_MIB above what it holds at the beginning.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

import nbmemprof as mp
from nbmemprof.watching import gauges, recorder

REQUEST = 4 << 20


def work(use_torch: bool):
    if use_torch:
        import torch

        return lambda: float(torch.ones(REQUEST // 4).sum())
    return lambda: float(np.ones(REQUEST // 4, np.float32).sum())


def main(folder: str, room_mib: float, leak: float, use_torch: bool) -> None:
    kept, answer = [], work(use_torch)
    for _ in range(20):
        answer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1

        def do_GET(self):
            body = str(answer()).encode()
            if leak:
                kept.append(bytearray(int(leak * REQUEST)))
            watch.step("sum")
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    limit = gauges.rss_bytes() + int(room_mib * (1 << 20))
    server = HTTPServer(("127.0.0.1", 0), Handler)
    with mp.watch(folder, interval_s=0.02, warmup_s=0.3, host_limit_bytes=limit, on_alarm=lambda alarm: print("ALARM", alarm.text, flush=True)) as watch:
        print(server.server_port, limit, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    if "--hurry" in sys.argv:  # seconds stand for days: more than a hundredth of a core may be spent on looking
        recorder._COST.update(read=0.1, judge=0.1)
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[sys.argv.index("--leak") + 1]) if "--leak" in sys.argv else 0.001, "--torch" in sys.argv)
