"""Requests a second that the client of reply servers can drive: against a server that answers at once, in a process of its own.

python -m benchmarks.reply_server [--requests 4000] [--concurrency 512] [--engine sglang]
"""

import argparse
import subprocess
import sys
import time

from data_prep.reply_server import Chats, answer_by_server
from data_prep.reply_wire import Asking
from data_prep.sampler import Request, Sampling
from eyas.config import RepliesConfig, TargetConfig
from eyas.progress import Task
from eyas.target import open_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    options = parser.parse_args()
    command = [sys.executable, "-m", "tests.data_prep.reply_engine", options.engine]
    tokenizer = open_target(TargetConfig(model="package:smollm2")).tokenizer()
    requests = [Request(str(number), [number % 200] * 120, 64) for number in range(options.requests)]
    asking = Asking(Sampling((1.0,), 1.0, 0), (9,), tokenizer)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        config = RepliesConfig(mode="server", servers=[url], concurrency=options.concurrency)
        start, busy = time.perf_counter(), time.process_time()
        with Task("replies", options.requests, "replies") as task:
            answer_by_server(requests, [url], asking, Chats([], {}), config, lambda request, outcome: None, task)
        took, busy = time.perf_counter() - start, time.process_time() - busy
        server.kill()
    print(f"{options.concurrency} in flight: {options.requests / took:.0f} requests a second")
    print(f"{options.requests / busy:.0f} requests a second of the client's own processor time")


if __name__ == "__main__":
    main()
