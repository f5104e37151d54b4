"""Record what a running vLLM server answers, for tests/eval/test_client_vllm.py, which have no vLLM:

    python tests/engines/record_vllm.py http://127.0.0.1:8000 tests/eval/recorded/vllm-0.32.0/eagle3

The server must have a model whose tokens 1 .. 50000 exist, and VLLM_SERVER_DEV_MODE=1. What no test reads is left out: environment and
machine of /server_info, and of /metrics all but vLLM's own counters.
"""

import json
import sys
from pathlib import Path

import httpx

PROMPT = [1, 9690, 198, 2683, 2, 198, 1, 520, 9531, 198]
COMPLETION = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.0, "stream": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 40, "temperature": 0.0}
SECTIONS = ("model_config", "cache_config", "scheduler_config", "speculative_config")


def record(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for name in ("version", "v1/models"):
            write(folder, name, http.get(f"/{name}").text)
        write(folder, "metrics", page(http))
        write(folder, "v1/completions", http.post("/v1/completions", json=COMPLETION | {"stream_options": {"include_usage": True}}).text)
        write(folder, "metrics.after", page(http))
        write(folder, "v1/chat/completions", http.post("/v1/chat/completions", json=CHAT).text)
        write(folder, "reset_prefix_cache", http.post("/reset_prefix_cache").text)
        write(folder, "too_long", http.post("/v1/completions", json=COMPLETION | {"max_tokens": 10**6}).text)
        config = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
        write(folder, "server_info", json.dumps({"vllm_config": {name: plain(config[name]) for name in SECTIONS}}, indent=1))


def plain(section: dict[str, object] | None) -> dict[str, object] | None:
    """Without the sections inside it."""
    return section and {name: value for name, value in section.items() if not isinstance(value, dict)}


def page(http: httpx.Client) -> str:
    lines = http.get("/metrics").text.splitlines(keepends=True)
    return "".join(line for line in lines if "vllm:" in line and "_bucket" not in line and "_created" not in line)


def write(folder: Path, route: str, text: str) -> None:
    (folder / route.replace("/", "_")).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
