"""The embedded server over real HTTP, in a real child process, as a client of SGLang uses it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from eval.clients import Client
from eval.engine import Engine
from eval.launcher import serving
from eval.server import load, run_server
from eval.text_stream import TextStream
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.folder import read_drafter
from eyas.manifest import begin, finish
from eyas.target import Target
from tests.eval.tiny import tiny_config, tiny_target, write_tiny_drafter

PROMPT = [70, 71, 72, 73]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("drafters")
    return {name: str(write_tiny_drafter(root / name, target, seed)) for seed, name in enumerate(("starter", "result"), 1)}


@pytest.fixture(scope="module")
def config(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(tmp_path_factory.mktemp("run"), target, context=250)


@pytest.fixture(scope="module")
def url(config: Config, drafters: dict[str, str]) -> Iterator[str]:
    with serving(config, drafters) as address:
        yield address


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def engine(target: Target, drafters: dict[str, str], config: Config) -> Engine:
    folders = {name: read_drafter(path) for name, path in drafters.items()}
    return Engine(target, folders, torch.float32, config.engine.context, config.engine.draft_steps)


def generate(http: httpx.Client, **body: Any) -> dict[str, Any]:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}} | body
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_health_models_and_information_answer(http: httpx.Client, target: Target) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/health_generate").status_code == 200
    model = http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == (target.name, 250)
    info = http.get("/server_info").json()
    assert (info["speculative_algorithm"], info["speculative_num_steps"], info["speculative_num_draft_tokens"]) == ("EAGLE3", 3, 4)
    assert info["eyas"]["drafters"] == ["starter", "result"]
    assert info["eyas"]["target_digest"] == target.digest
    assert http.post("/flush_cache").status_code == 200


def test_generate_serves_what_the_engine_decodes_with_sglangs_counts(http: httpx.Client, engine: Engine) -> None:
    for name in ("starter", "result"):
        expected = engine.generate(PROMPT, 20, drafter=name, stop_ids=())
        answer = generate(http, speculative=name)
        meta = answer["meta_info"]
        assert answer["output_ids"] == expected.output_ids
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 20, 0)
        assert meta["finish_reason"] == {"type": "length", "length": 20}
        assert meta["e2e_latency"] > 0
        assert meta["spec_verify_ct"] == expected.verify_ct
        assert meta["spec_num_correct_drafts"] == sum(expected.accepted)
        assert meta["spec_num_proposed_drafts"] == 3 * expected.verify_ct
        assert meta["spec_accept_rate"] == sum(expected.accepted) / (3 * expected.verify_ct)
        assert meta["spec_accept_length"] == 20 / expected.verify_ct
        assert meta["spec_correct_drafts_histogram"] == [expected.accepted.count(drafts) for drafts in range(4)]
        assert meta["eyas"]["accepted"] == expected.accepted
        assert meta["eyas"]["counts"] == expected.counts


def test_speculation_is_chosen_per_request_and_the_first_drafter_is_the_default(http: httpx.Client) -> None:
    baseline, default, named = generate(http, speculative="none"), generate(http), generate(http, speculative="starter")
    assert baseline["output_ids"] == default["output_ids"] == named["output_ids"]
    assert "spec_verify_ct" not in baseline["meta_info"]
    assert baseline["meta_info"]["eyas"]["counts"]["decode"] == 19
    assert default["meta_info"]["spec_num_correct_drafts"] == named["meta_info"]["spec_num_correct_drafts"]


def test_text_and_ids_of_it_are_the_same_prompt(http: httpx.Client, target: Target) -> None:
    ids = target.tokenizer()("What is it?")["input_ids"]
    assert generate(http, input_ids=None, text="What is it?")["output_ids"] == generate(http, input_ids=ids)["output_ids"]


def test_streamed_generation_grows_to_the_whole_answer(http: httpx.Client) -> None:
    whole = generate(http)
    pieces = events(
        http,
        "/generate",
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}, "stream": True},
    )
    assert len(pieces[0]["output_ids"]) == 1  # the first token does not wait for the first cycle
    for before, after in pairwise(pieces):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])
    assert pieces[-2]["output_ids"] == whole["output_ids"]  # no piece is held back until the reply is finished
    assert (pieces[-1]["output_ids"], pieces[-1]["text"]) == (whole["output_ids"], whole["text"])
    assert pieces[-1]["meta_info"]["spec_verify_ct"] == whole["meta_info"]["spec_verify_ct"]


CHAT = {"model": "any", "messages": [{"role": "user", "content": "Say é!"}], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def test_chat_renders_the_template_and_answers_in_openai_form(http: httpx.Client, target: Target) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT | {"return_meta_info": True, "return_spec_tokens_details": True}).json()
    ids = target.tokenizer()("u:Say é!\na:")["input_ids"]
    choice, expected = (
        answer["choices"][0],
        generate(http, input_ids=ids, sampling_params={"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}),
    )
    assert (answer["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert choice["message"]["content"] == expected["text"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 16,
        "total_tokens": len(ids) + 16,
        "prompt_tokens_details": None,
    }
    assert choice["meta_info"]["spec_verify_ct"] == expected["meta_info"]["spec_verify_ct"]
    assert answer["sglext"]["spec_tokens_details"]["spec_verify_ct"] == expected["meta_info"]["spec_verify_ct"]
    assert "meta_info" not in http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]


def test_streamed_chat_adds_up_to_the_whole_answer_and_ends_with_usage(http: httpx.Client) -> None:
    whole = http.post("/v1/chat/completions", json=CHAT).json()
    pieces = events(http, "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert pieces[-2]["choices"][0]["finish_reason"] == "length"
    assert (pieces[-1]["choices"], pieces[-1]["usage"]) == ([], whole["usage"])
    assert len({piece["id"] for piece in pieces}) == 1


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(http: httpx.Client, target: Target) -> None:
    whole = generate(http)["output_ids"]
    stop = whole[7]
    first = whole.index(stop)
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True, "stop_token_ids": [stop]}
    answer = generate(http, sampling_params=sampling)
    assert answer["output_ids"] == whole[: first + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == target.tokenizer().decode(whole[:first], skip_special_tokens=True)
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    assert all(answer["text"].startswith(piece["text"]) for piece in events(http, "/generate", body))


def test_a_seed_makes_sampling_repeatable(http: httpx.Client) -> None:
    def sampled(**seed: int) -> list[int]:
        return generate(http, sampling_params={"max_new_tokens": 30, "temperature": 1.5, "ignore_eos": True} | seed)["output_ids"]

    assert sampled(sampling_seed=4) == sampled(sampling_seed=4)
    assert sampled(sampling_seed=4) != sampled(sampling_seed=5)
    assert sampled() != sampled()


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/generate", b"{not json", "JSON"),
        ("/generate", b"", "JSON"),
        ("/generate", b"[1, 2]", "object"),
        ("/generate", b'{"text": "\xff"}', "unicode"),
        ("/generate", b"[" * 100_000, "recursion"),
        ("/generate", {}, "either text or input_ids"),
        ("/generate", {"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ("/generate", {"input_ids": []}, "0 tokens"),
        ("/generate", {"input_ids": [300]}, "0 to 299"),
        ("/generate", {"input_ids": [1] * 250}, "250 tokens; 1 to 249 fit"),
        ("/generate", {"input_ids": [[1, 2]]}, "input_ids.0"),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 0.9}}, "top_p = 0.9 is not supported"),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 5}}, "max_tokens = 5 is not supported"),
        ("/generate", {"input_ids": [1], "speculative": "other"}, "no drafter 'other'; there are none, starter, result"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", CHAT | {"n": 2}, "n = 2 is not supported"),
        ("/v1/chat/completions", CHAT | {"stream": True, "return_meta_info": True}, "return_meta_info"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 300}]}, "tokens; 1 to 249 fit"),
    ],
)
def test_a_bad_request_is_answered_400_with_the_reason(http: httpx.Client, path: str, body: Any, told: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert told in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert "\n" not in error["message"]


def test_a_body_beyond_the_limit_is_refused(http: httpx.Client) -> None:
    response = http.post("/generate", content=b'{"text": "' + b"x" * (9 << 20) + b'"}')
    assert response.status_code == 400
    assert "larger than 8 MiB" in response.json()["error"]["message"]


def test_an_unknown_route_is_an_openai_style_404(http: httpx.Client) -> None:
    response = http.get("/nothing")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")


LONG = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 240, "temperature": 0, "ignore_eos": True}, "speculative": "none"}


def wait_until_idle(http: httpx.Client) -> float:
    start = time.monotonic()
    while http.post("/flush_cache").status_code != 200:
        time.sleep(0.005)
        assert time.monotonic() - start < 30
    return time.monotonic() - start


def test_requests_wait_in_line_and_flush_cache_refuses_meanwhile(http: httpx.Client, url: str) -> None:
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=60) as other,
        ThreadPoolExecutor(8) as pool,
        other.stream("POST", "/generate", json=LONG | {"stream": True}) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        behind = [pool.submit(other.post, "/generate", json=LONG) for _ in range(8)]  # one long reply may be over before we have asked
        assert http.post("/flush_cache").status_code == 400
        assert http.get("/health_generate").status_code == 200
        assert generate(http)["meta_info"]["completion_tokens"] == 20
        assert list(lines)[-2] == "data: [DONE]"
        assert [reply.result().json()["meta_info"]["completion_tokens"] for reply in behind] == [240] * 8
    wait_until_idle(http)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_stops_its_decoding(url: str, http: httpx.Client, stream: bool) -> None:
    start = time.monotonic()
    http.post("/generate", json=LONG)
    whole_s = time.monotonic() - start
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": stream}).encode()
    waiting = []
    for _ in range(12):  # all of them together would keep the engine busy for twelve whole replies
        connection = socket.create_connection((host, int(port)))
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        waiting.append(connection)
    time.sleep(0.05)
    for connection in waiting:
        connection.close()
    assert wait_until_idle(http) < 6 * whole_s
    assert generate(http)["meta_info"]["completion_tokens"] == 20


def test_our_client_reads_what_our_server_sends(url: str) -> None:
    with Client(url) as client:
        client.ready()
        client.flush_cache()
        reply = client.generate(PROMPT, 20, 0.0, 0, "result")
        assert (reply.completion_tokens, reply.first_tokens, reply.cached_tokens) == (len(reply.output_ids), 1, 0)
        assert reply.counts is not None
        assert sum(reply.counts.histogram) == reply.counts.verify_ct
        assert client.generate(PROMPT, 20, 0.0, 0, "none").counts is None
        assert client.chat([{"role": "user", "content": "hi"}], 4, 0.0, "none").prompt_tokens == len("u:hi\na:")


def test_pieces_of_text_never_split_a_character_and_add_up(target: Target) -> None:
    tokenizer = target.tokenizer()
    text = "aé€😀b\n"
    stream = TextStream(tokenizer, True)
    pieces = [stream.add([token]) for token in tokenizer(text)["input_ids"]] + [stream.end()]
    assert "".join(pieces) == stream.text == text
    assert [piece for piece in pieces if piece] == list(text)
    broken = TextStream(tokenizer, True)
    assert broken.add(tokenizer("€")["input_ids"][:2]) == ""
    assert broken.end() == "\ufffd"


def processes() -> Iterator[tuple[int, str, int, int]]:
    """(pid, state, parent, group) of everything that runs."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:  # it ended meanwhile
                continue
            yield int(entry.name), state, int(parent), int(group)


def group_members(group: int) -> list[int]:
    return [pid for pid, state, _, its_group in processes() if its_group == group and state != "Z"]


def servers_of(parent: int) -> set[int]:
    """Its children that lead a process group of their own."""
    return {pid for pid, _, its_parent, group in processes() if its_parent == parent and group == pid}


def test_the_server_is_gone_when_the_block_ends_even_in_the_middle_of_a_request(
    config: Config, drafters: dict[str, str], tmp_path: Path
) -> None:
    before = servers_of(os.getpid())
    config = config.model_copy(update={"output": tmp_path})  # a run has one server at a time
    with serving(config, drafters) as address, httpx.Client(base_url=address, trust_env=False, timeout=60) as client:
        (server,) = servers_of(os.getpid()) - before
        with client.stream("POST", "/generate", json=LONG | {"stream": True}) as response:
            next(response.iter_lines())
    assert group_members(server) == []


def test_a_killed_parent_leaves_no_server_behind(config: Config, target: Target, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom eval.launcher import serving\nfrom tests.eval.tiny import tiny_config\n"
        "from eyas.target import Target\n"
        f"with serving(tiny_config(Path({str(tmp_path)!r}), Target(Path({str(target.folder)!r}), 'tiny')), {{}}):\n"
        "    print('up', flush=True)\n    time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    (server,) = servers_of(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while group_members(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_dies_while_loading_is_an_error_with_its_last_words(target: Target, tmp_path: Path) -> None:
    told = r"died while loading \(exit code 1\): drafter folder .*missing does not exist"
    with pytest.raises(EyasError, match=told), serving(tiny_config(tmp_path, target), {"result": str(tmp_path / "missing")}):
        pass


def test_a_drafter_of_ambiguous_layers_is_served_on_those_the_run_captured(target: Target, tmp_path: Path) -> None:
    path = write_tiny_drafter(tmp_path / "drafter", target) / "config.json"
    record = read_json(path)
    record = {name: value for name, value in record.items() if name not in ("eyas", "eagle_aux_hidden_state_layer_ids")}
    write_json(path, record)  # as a foreign one: ids for one engine, no word on what they mean
    config = tiny_config(tmp_path / "run", target)
    states = config.prep.states.model_copy(update={"layers": [0, 2, 3]})
    captured = config.model_copy(update={"prep": config.prep.model_copy(update={"states": states})})
    for run, layers in ((config, (1, 3, 4)), (captured, (0, 2, 3))):
        assert load(run, {"starter": str(path.parent)}).engine.layers == {"starter": layers}

    # as prep leaves it that has measured the warm start
    warm = config.model_copy(update={"drafter": config.drafter.model_copy(update={"init": str(path.parent)})})
    begin(config.folder("states/train"), "states", {}, {})
    finish(config.folder("states/train"), {"warm_start": {"layers": [0, 2, 3]}})
    assert load(warm, {"starter": str(path.parent)}).engine.layers == {"starter": (0, 2, 3)}
    assert load(config, {"starter": str(path.parent)}).engine.layers == {"starter": (1, 3, 4)}


def test_a_port_in_use_is_refused(config: Config) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EyasError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use; choose another engine.port"):
            run_server(config, {}, port=port)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"drafters": {"none": "x"}}, "cannot be called 'none'"),
        ({"default": "other"}, "the default drafter 'other'"),
        ({"host": "256.1.1.1"}, "engine.host 256.1.1.1"),
        ({"port": 70000}, "cannot listen on"),
    ],
)
def test_what_cannot_be_served_is_refused(config: Config, asked: dict[str, Any], told: str) -> None:
    engine = config.engine.model_copy(update={"host": asked.get("host", config.engine.host)})
    with pytest.raises(EyasError, match=told):
        run_server(config.model_copy(update={"engine": engine}), asked.get("drafters", {}), asked.get("default"), asked.get("port", 0))


def test_texts_and_chats_are_tokenised_as_they_would_be_served(http: httpx.Client, target: Target) -> None:
    tokenizer, messages = target.tokenizer(), [{"role": "user", "content": "why?"}]
    chat = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": True}).json()
    assert chat["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat["count"] == len(chat["tokens"])
    text = http.post("/tokenize", json={"prompt": "why?", "add_special_tokens": False}).json()
    assert text["tokens"] == tokenizer.encode("why?", add_special_tokens=False)
    assert http.post("/detokenize", json={"tokens": text["tokens"]}).json() == {"text": "why?"}
    refused = http.post("/tokenize", json={"prompt": "why?", "messages": messages})
    assert refused.status_code == 400
    assert "either prompt or messages" in refused.json()["error"]["message"]


def test_the_pieces_of_a_stream_are_the_verify_steps(url: str, engine: Engine) -> None:
    expected = engine.generate(PROMPT, 20, drafter="result")
    with Client(url) as client:
        reply = client.generate(PROMPT, 20, 0.0, 0, "result")
    assert list(reply.output_ids) == expected.output_ids
    assert reply.pieces[0] == 1
    assert [tokens - 1 for tokens in reply.pieces[1:-1]] == expected.accepted[:-1]
    assert sum(reply.pieces) == reply.completion_tokens
