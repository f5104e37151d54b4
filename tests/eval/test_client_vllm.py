"""The vLLM client against what a real vLLM 0.32.0 answered (tests/engines/record_vllm.py), replayed by a small HTTP server."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval.clients import Client, Counts, VllmClient, connect
from eyas.errors import EyasError
from tests.http_server import running

RECORDED = Path(__file__).parent / "recorded" / "vllm-0.32.0"
PROMPT = [1, 9690, 198, 2683, 2, 198, 1, 520, 9531, 198]
TEXT = "The United States has a long history of using non-lethal weapons, including firearms, to combat crime. This has"
# Cycle by cycle the server accepted 0,0,0,1,0,1,0,1,0,0,0,1,1,1,1,1 of 3 drafts.
COUNTS = Counts(verify_ct=16, correct=8, proposed=48, histogram=(8, 8, 0, 0), engine_length=1.5)


class Replay(ThreadingHTTPServer):
    """Answers each route with its recording; a list of recordings is answered one after the other, the last one from then on."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, list[str]] = {}
        for name in ("version", "v1/models", "metrics", "v1/completions", "v1/chat/completions", "reset_prefix_cache", "server_info"):
            self.answers[f"/{name}"] = [recorded(folder, name)]
        self.status: dict[str, int] = {}
        self.log: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, route: str) -> list[Any]:
        return [body for path, body in self.log if path == route]


class Handler(BaseHTTPRequestHandler):
    server: Replay

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        route = self.path.partition("?")[0]
        length = int(self.headers.get("Content-Length") or 0)
        self.server.log.append((route, json.loads(self.rfile.read(length)) if length else None))
        texts = self.server.answers.get(route, ['{"detail":"Not Found"}'])
        data = (texts.pop(0) if len(texts) > 1 else texts[0]).encode()
        self.send_response(self.server.status.get(route, 200 if route in self.server.answers else 404))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET


def recorded(folder: Path, route: str) -> str:
    return (folder / route.replace("/", "_")).read_text(encoding="utf-8")


@pytest.fixture
def eagle3() -> Iterator[Replay]:
    """Speculates with the starter drafter and reports acceptance per request."""
    with running(Replay(RECORDED / "eagle3")) as server:
        yield server


@pytest.fixture
def counting(eagle3: Replay) -> Replay:
    """The same server without --per-request-spec-decode-metrics, asked for one completion."""
    for route in ("/v1/completions", "/v1/chat/completions"):
        eagle3.answers[route] = [without_metrics(eagle3.answers[route][0])]
    eagle3.answers["/metrics"].append(recorded(RECORDED / "eagle3", "metrics.after"))
    return eagle3


def without_metrics(text: str) -> str:
    def stripped(line: str) -> str:
        before, brace, payload = line.partition("{")
        if not brace:
            return line
        event = json.loads(brace + payload)
        assert event.pop("metrics", {}).get("speculative_decoding") or event["choices"]
        return before + json.dumps(event)

    return "\n".join(map(stripped, text.split("\n")))


@pytest.fixture
def baseline() -> Iterator[Replay]:
    with running(Replay(RECORDED / "baseline")) as server:
        yield server


def test_a_streamed_reply_has_ids_text_and_the_counts_of_its_request(eagle3):
    with VllmClient(eagle3.url) as client:
        reply = client.generate(PROMPT, 24, 0.0, 0)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens, reply.finish_reason) == (10, 24, 0, "length")
    assert reply.output_ids[:6] == (504, 1797, 1918, 553, 253, 986)
    assert len(reply.output_ids) == 24
    assert reply.text == TEXT
    assert reply.counts == COUNTS
    assert reply.first_tokens == 1
    assert 0 < reply.first_token_s <= reply.total_s


def test_what_is_asked_for_is_exactly_the_prompt_with_no_sampling_of_the_models_own(eagle3):
    with VllmClient(eagle3.url) as client:
        client.generate(PROMPT, 24, 0.0, 5)
        client.generate(PROMPT, 24, 0.7, 5)
    greedy, sampled = eagle3.asked("/v1/completions")
    assert greedy == {
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert sampled == greedy | {"temperature": 0.7, "seed": 5}


def test_counters_are_read_no_more_once_a_reply_brings_its_own_counts(eagle3):
    with VllmClient(eagle3.url) as client:
        for _ in range(3):
            assert client.generate(PROMPT, 24, 0.0, 0).counts == COUNTS
    assert len(eagle3.asked("/metrics")) == 1


def test_the_difference_of_the_counters_gives_the_same_counts(counting):
    with VllmClient(counting.url) as client:
        assert client.generate(PROMPT, 24, 0.0, 0).counts == COUNTS


def test_counters_that_somebody_else_moved_are_not_taken_for_ours(counting):
    moved = counting.answers["/metrics"][1]
    counting.answers["/metrics"][1] = moved.replace(generated(moved), 'vllm:generation_tokens_total{engine="0"} 1000.0')
    with (
        VllmClient(counting.url) as client,
        pytest.raises(EyasError, match=r"others use this server too.*--per-request-spec-decode-metrics"),
    ):
        client.generate(PROMPT, 24, 0.0, 0)


def generated(page: str) -> str:
    return next(line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total"))


def test_without_speculation_there_are_no_counts(baseline):
    with VllmClient(baseline.url) as client:
        replies = [client.generate(PROMPT, 24, 0.0, 0) for _ in range(2)]
    assert [(reply.text, reply.counts) for reply in replies] == [(TEXT, None)] * 2
    assert len(baseline.asked("/metrics")) == 1


def test_a_chat_carries_the_acceptance_of_its_request(eagle3):
    with VllmClient(eagle3.url) as client:
        reply = client.chat([{"role": "user", "content": "What is the capital of France?"}], 40, 0.0)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.text) == (37, 8, "The capital of France is Paris.")
    assert (reply.finish_reason, reply.output_ids) == ("stop", ())
    # 3, 0 and 2 drafts accepted, the last step untrimmed: the reply ends within it
    assert reply.counts == Counts(3, 5, 9, (1, 0, 1, 1), pytest.approx(1 + 5 / 3))


def test_a_chat_is_counted_by_counters_too(counting):
    counting.answers["/metrics"].pop()
    with VllmClient(counting.url) as client, pytest.raises(EyasError, match="moved by 0 tokens during a reply of 8"):
        client.chat([{"role": "user", "content": "What is the capital of France?"}], 40, 0.0)


def test_server_info_has_sglangs_names_and_vllms_sections(eagle3, baseline):
    with VllmClient(eagle3.url) as client:
        info = client.server_info()
    assert {name: info[name] for name in info if not name.endswith("_config")} == {
        "version": "vllm 0.32.0",
        "model_path": "checkpoints/targets/smollm2-135m-instruct",
        "served_model_name": "checkpoints/targets/smollm2-135m-instruct",
        "context_length": 2048,
        "dtype": "float32",
        "max_running_requests": 128,
        "disable_radix_cache": True,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "checkpoints/starter-smollm2",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    assert info["scheduler_config"]["max_num_batched_tokens"] == 2048
    with VllmClient(baseline.url) as client:
        info = client.server_info()
    assert (info["dtype"], info["max_running_requests"]) == ("float32", 128)
    assert [info[name] for name in info if name.startswith("speculative_")] == [None] * 6


def test_a_server_that_does_not_tell_its_arguments_still_tells_whether_it_speculates(eagle3):
    del eagle3.answers["/server_info"]
    with VllmClient(eagle3.url) as client:
        info = client.server_info()
    assert (info["speculative_algorithm"], info["speculative_num_steps"], info["speculative_draft_model_path"]) == ("UNKNOWN", 3, None)
    assert (info["version"], info["context_length"], info["dtype"]) == ("vllm 0.32.0", 2048, None)


def test_a_server_without_a_prefix_cache_is_not_asked_to_empty_it(eagle3):
    del eagle3.answers["/reset_prefix_cache"]
    with VllmClient(eagle3.url) as client:
        client.flush_cache()
        client.flush_cache()
    assert [path for path, _ in eagle3.log] == ["/metrics"]


@pytest.fixture
def caching(eagle3: Replay) -> Replay:
    eagle3.answers["/metrics"] = [eagle3.answers["/metrics"][0].replace('enable_prefix_caching="False"', 'enable_prefix_caching="True"')]
    return eagle3


def test_a_prefix_cache_is_emptied(caching):
    with VllmClient(caching.url) as client:
        client.flush_cache()
    assert caching.log[-1][0] == "/reset_prefix_cache"


def test_a_prefix_cache_that_cannot_be_emptied_is_an_error(caching):
    caching.answers["/reset_prefix_cache"] = ['{"success":false}']
    with VllmClient(caching.url) as client:
        with pytest.raises(EyasError, match="the cache was not emptied; are other requests running"):
            client.flush_cache()
        del caching.answers["/reset_prefix_cache"]
        with pytest.raises(EyasError, match=r"start vLLM with --no-enable-prefix-caching, or with VLLM_SERVER_DEV_MODE=1"):
            client.flush_cache()


def test_ready_means_a_token(eagle3):
    eagle3.answers["/v1/completions"] = ['{"choices": []}']
    with VllmClient(eagle3.url) as client:
        client.ready()
    assert eagle3.asked("/v1/completions") == [{"prompt": [0], "max_tokens": 1, "temperature": 0.0}]


def test_an_error_answer_is_one_line_with_the_servers_own_words(eagle3):
    eagle3.answers["/v1/completions"], eagle3.status["/v1/completions"] = [recorded(RECORDED / "eagle3", "too_long")], 400
    with VllmClient(eagle3.url) as client, pytest.raises(EyasError, match=r"/v1/completions answered 400: .*max_tokens.*1000000"):
        client.generate(PROMPT, 10**6, 0.0, 0)


def test_a_stream_that_ends_too_early_is_no_reply(eagle3):
    pieces = eagle3.answers["/v1/completions"][0].split("\n\n")
    eagle3.answers["/v1/completions"] = ["\n\n".join(pieces[:4])]
    with VllmClient(eagle3.url) as client, pytest.raises(EyasError, match="stream ended before the reply was finished"):
        client.generate(PROMPT, 24, 0.0, 0)


def test_speculation_cannot_be_asked_for_per_request(eagle3):
    with VllmClient(eagle3.url) as client, pytest.raises(EyasError, match="cannot switch speculation per request"):
        client.generate(PROMPT, 24, 0.0, 0, "result")


def test_another_way_of_reporting_acceptance_is_said(eagle3):
    eagle3.answers["/v1/completions"] = [eagle3.answers["/v1/completions"][0].replace("num_spec_steps", "num_steps")]
    with VllmClient(eagle3.url) as client, pytest.raises(EyasError, match="acceptance without 'num_spec_steps'"):
        client.generate(PROMPT, 24, 0.0, 0)


def test_connect_tells_the_servers_apart(eagle3, toy_server):
    with connect(eagle3.url) as client:
        assert isinstance(client, VllmClient)
    with connect(toy_server.url) as client:
        assert isinstance(client, Client)
