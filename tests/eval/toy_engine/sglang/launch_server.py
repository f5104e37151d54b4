"""A server that starts as SGLang does, by its log lines, its worker process and its routes, or fails in the way that TOY names.

| TOY | what it does |
|---|---|
| ready | loads in a moment, answers |
| slow | takes a second over each of 30 shards |
| hang | writes nothing and does nothing after 'Load weight begin' |
| spin | the same, but its worker computes |
| stubborn | answers; a child ignores SIGTERM, another has left the session too |
| shard | reads a file that is not there |
| port | finds its port taken, by a child of its own, after loading |
| memory | ends as torch does when the GPU is full |
| overwrite | answers; changes NCCL_ALGO before it starts its worker |
| slow-death | answers, and dies by SIGKILL when asked for /die |
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORKER = "import sys\nif sys.argv[1] == 'spin':\n    while True: pass\nsys.stdin.read()"
DEAF = "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)"


def say(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.send_response(200 if self.path == "/health_generate" else 404)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        say(f'INFO:     {self.client_address[0]}:{self.client_address[1]} - "{self.command} {self.path} HTTP/1.1" 200 OK')


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch_server.py")
    for flag in ("model-path", "context-length", "dtype", "host", "port", "speculative-algorithm", "speculative-draft-model-path"):
        parser.add_argument(f"--{flag}")
    for flag in ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"):
        parser.add_argument(f"--{flag}", type=int)
    return parser.parse_args()


def load(toy: str, what: str) -> None:
    say("Load weight begin. avail mem=16.03 GB")
    if toy == "shard":
        Path(what, "model-00002-of-00002.safetensors").read_bytes()
    if toy == "memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 95.00 GiB")
    while toy in ("hang", "spin"):
        time.sleep(60)
    shards = 30 if toy == "slow" else 2
    for shard in range(shards):
        time.sleep(1.0 if toy == "slow" else 0.01)
        percent = 100 * (shard + 1) // shards
        sys.stderr.write(f"\rMulti-thread loading shards: {percent:3d}% Completed | {shard + 1}/{shards} [00:00<00:00,  9.00it/s]")
        sys.stderr.flush()
    sys.stderr.write("\n")
    say("Load weight end. elapsed=0.02 s, type=LlamaForCausalLM, avail mem=15.44 GB, mem usage=0.59 GB.")


def main() -> None:
    asked, toy = arguments(), os.environ["TOY"]
    say("server_args={'model_path': ...}")
    if toy == "overwrite":
        os.environ["NCCL_ALGO"] = "Tree"
    subprocess.Popen([sys.executable, "-c", WORKER, toy], stdin=subprocess.PIPE)
    if toy == "stubborn":
        for own_session in (False, True):
            deaf = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, start_new_session=own_session)
            deaf.stdout.readline()
    say("Init parallel begin.")
    load(toy, asked.model_path)
    say("KV Cache is allocated. dtype: torch.float32, #tokens: 8192, K size: 0.18 GB, V size: 0.18 GB")
    say("max_total_num_tokens=8192, chunked_prefill_size=4096, max_running_requests=4, context_len=2048")
    if toy == "port":
        other = socket.socket()
        other.bind((asked.host, int(asked.port)))
        other.listen()
    server = ThreadingHTTPServer((asked.host, int(asked.port)), Handler)
    say("The server is fired up and ready to roll!")
    server.serve_forever()


if __name__ == "__main__":
    main()
