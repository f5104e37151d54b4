"""The stage's replies from servers: every prompt in its set once, whatever happens to the run; the same rows as from the target itself."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import uvicorn

import data_prep.prep
from data_prep.prompts import split_prompts
from data_prep.replies import QUARANTINE, SETS, THINKS, read_rows, write_replies
from data_prep.template import THINKING_OFF, prompt_ids
from eval.server import create_app, load
from eyas.attention_hf import NAME as ATTENTION
from eyas.config import Config, RepliesConfig
from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.manifest import read_manifest
from tests.data_prep.conftest import CHATML
from tests.data_prep.reply_engine import ReplyEngine, reply_to, serving

ROOT = Path(__file__).parents[2]
QUICK = {"give_up_s": 30, "timeout_s": 60}


def served(make_config, *urls, output="out", replies=None, **prep):
    settings = {"mode": "server", "servers": list(urls), "temperatures": [1.0], **QUICK, **(replies or {})}
    return make_config(output, replies=settings, **prep)


def run(config, target):
    return write_replies(config, target, split_prompts(config.prep, config.seed), lambda: pytest.fail("model loaded"))


def lines(folder, name):
    return [record for _, record in read_jsonl(folder / f"{name}.jsonl")]


def tiny_engine(target, **settings):
    """A server of the tiny target's template and end token."""
    tokenizer = target.tokenizer()
    end = tokenizer.eos_token_id

    def render(body):
        return prompt_ids(tokenizer, body["messages"], body.get("chat_template_kwargs"))

    return ReplyEngine(stop=end, reply=lambda ids, limit: reply_to(ids, limit, end), render=render, **settings)


@contextmanager
def embedded(config):
    """The embedded server of the config's target, in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(load(config, {})), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_the_embedded_server_gives_the_rows_that_the_sampler_gives_greedily(make_config, tiny):
    engine = {"context": 256, "dtype": "float32"}
    here = make_config("here", replies={"temperatures": [0.0]})
    here = Config.model_validate(here.model_dump() | {"engine": engine})
    write_replies(here, tiny, split_prompts(here.prep, here.seed), lambda: tiny.load_model(torch.float32, "cpu", ATTENTION))
    with embedded(here) as url:
        config = served(make_config, url, output="there", replies={"temperatures": [0.0], "concurrency": 4})
        folder = run(config, tiny)
    for name in ("train", "greedy"):
        ours, theirs = ({row.prompt_key: row.tokens for row in read_rows(chosen, tiny, name).usable} for chosen in (here, config))
        assert ours == theirs
        assert {(record["finished"], record["finish_reason"]) for record in lines(folder, name)} <= {(True, "stop"), (False, "length")}
    assert read_manifest(folder).holds["sets"]["sampled"]["replies"] == 4


def test_each_set_is_asked_at_its_temperature_and_every_prompt_answered_once(make_config, tiny):
    with serving(tiny_engine(tiny)) as engine:
        config = served(make_config, engine.url, replies={"serving_temperature": 0.5})
        folder = run(config, tiny)
    split = split_prompts(config.prep, config.seed)
    for name, prompts, temperature in (("train", split.train, 1.0), ("greedy", split.heldout, 0.0), ("sampled", split.heldout, 0.5)):
        assert sorted(record["key"] for record in lines(folder, name)) == sorted(prompt.key for prompt in prompts)
        assert {record["temperature"] for record in lines(folder, name)} == {temperature}
    asked = Counter(body["sampling_params"]["temperature"] for body in engine.bodies)
    assert asked == {1.0: len(split.train), 0.0: 4, 0.5: 4}


def test_a_finished_folder_needs_no_server_and_other_servers_change_nothing(make_config, tiny):
    with serving(tiny_engine(tiny)) as engine:
        folder = run(served(make_config, engine.url), tiny)
    before = (folder / "manifest.json").read_bytes()
    assert run(served(make_config, "http://127.0.0.1:9", replies={"concurrency": 3, "retries": 1}), tiny) == folder
    assert (folder / "manifest.json").read_bytes() == before
    with pytest.raises(EyasError, match="reasoning is None there and 'drop' here"):
        run(served(make_config, "http://127.0.0.1:9", replies={"reasoning": "drop"}), tiny)


def test_what_failed_is_quarantined_and_asked_again_when_the_run_is_resumed(make_config, tiny):
    broken = []
    engine = tiny_engine(tiny, fault=lambda ids: 400 if broken and ids == broken[0] else None)
    with serving(engine):
        config = served(make_config, engine.url, max_quarantine=0.0)
        train = split_prompts(config.prep, config.seed).train
        broken.append(prompt_ids(tiny.tokenizer(), train[0].messages))
        with pytest.raises(EyasError, match=r"1 of \d+ rows are unusable \(1 refused by the server \(400\)\)"):
            run(config, tiny)
        faults = [record for _, record in read_jsonl(config.folder("replies") / QUARANTINE)]
        assert [(fault["key"], fault["reason"]) for fault in faults] == [(train[0].key, "refused by the server (400)")]
        broken.clear()
        folder = run(config, tiny)
    assert sorted(record["key"] for record in lines(folder, "train")) == sorted(prompt.key for prompt in train)
    assert max(engine.answered.values()) == 2  # a held-out prompt greedily and at the serving temperature


def test_a_server_that_refuses_everything_stops_the_run_early(make_config, tiny):
    with serving(tiny_engine(tiny, fault=lambda ids: 400)) as engine:
        with pytest.raises(EyasError, match=r"rows are unusable .*refused by the server"):
            run(served(make_config, engine.url, replies={"concurrency": 1}), tiny)
        assert len(engine.bodies) <= 5


def test_with_reasoning_dropped_thinking_is_off_and_a_reply_that_thinks_is_quarantined(make_config, tiny, monkeypatch):
    tokenizer = tiny.tokenizer()
    off = "{% if thinking is false %}{{ '</think>' }}{% endif %}"
    tokenizer.chat_template = CHATML.replace("assistant\n' }}", "assistant\n<think>' }}" + off)
    monkeypatch.setattr(type(tiny), "tokenizer", lambda self: tokenizer)
    opening, closing = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    engine = tiny_engine(tiny)
    thinker = prompt_ids(tokenizer, split_prompts(make_config().prep, 0).train[0].messages, THINKING_OFF)
    plain = engine.reply
    engine.reply = lambda ids, limit: (([50, closing] if ids == thinker else []) + plain(ids, limit))[:limit]
    with serving(engine):
        kept = run(served(make_config, engine.url, output="kept"), tiny)
        dropped = run(served(make_config, engine.url, output="dropped", replies={"reasoning": "drop"}), tiny)
    assert {record["prompt_ids"][-1] for record in lines(kept, "train")} == {opening}
    assert {tuple(record["prompt_ids"][-2:]) for record in lines(dropped, "train")} == {(opening, closing)}
    assert read_manifest(dropped).holds["quarantined"] == {THINKS: 1}
    assert len(lines(dropped, "train")) == len(lines(kept, "train")) - 1


def test_without_urls_the_configured_engine_is_started_once_and_ended_before_the_capture(make_config, tiny, monkeypatch):
    events = []

    @contextmanager
    def start_server(flags, environment):
        with serving(tiny_engine(tiny)) as engine:
            events.append(("started", flags, environment))
            yield engine.url
        events.append("ended")

    capture = data_prep.prep.capture
    monkeypatch.setattr(data_prep.prep, "capture", lambda *arguments: events.append("capture") or capture(*arguments))
    config = served(make_config)
    config = Config.model_validate(config.model_dump() | {"engine": {"kind": "sglang", "context": 256}})
    data_prep.prep.run_prep(config, start_server)
    assert events == [("started", {}, {}), "ended", *["capture"] * 3]
    assert len(lines(config.folder("replies"), "sampled")) == 4


def test_a_server_without_urls_is_asked_for_by_name(make_config, tiny):
    with pytest.raises(EyasError, match=r"prep\.replies\.servers is empty"):
        run(served(make_config), tiny)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "generate", "servers": ["http://a:1"]}, "asked with mode: server"),
        ({"mode": "server", "servers": ["a:1"]}, "expected http://HOST:PORT"),
        ({"mode": "server", "servers": ["http://a:1", "http://a:1"]}, "one is there twice"),
    ],
)
def test_a_wrong_list_of_servers_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        RepliesConfig(**settings)


def start(config, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "eyas", "prep", "-c", str(path)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_for_lines(path, count, process):
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)


def many(tmp_path):
    """Sources of 300 distinct prompts."""
    source = tmp_path / "many.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{number} {number * 7919 % 1009} tell"}) + "\n" for number in range(300)))
    return {"sources": [{"source": str(source)}], "heldout": {"prompts": 4, "near_duplicate": 1}}


def test_a_run_killed_at_random_moments_loses_and_doubles_nothing(make_config, tiny, tmp_path):
    chooser = random.Random(1)
    with serving(tiny_engine(tiny, delay_s=0.05)) as engine:
        config = served(make_config, engine.url, replies={"concurrency": 16}, **many(tmp_path))
        train = config.folder("replies") / "train.jsonl"
        for wanted in (chooser.randrange(1, 60), chooser.randrange(100, 200)):
            process = start(config, tmp_path)
            wait_for_lines(train, wanted, process)
            time.sleep(chooser.random() * 0.05)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        survived = train.read_bytes().count(b"\n")
        folder = run(config, tiny)
    split = split_prompts(config.prep, config.seed)
    assert 100 <= survived < len(split.train)
    for name, prompts in (("train", split.train), ("greedy", split.heldout), ("sampled", split.heldout)):
        records = lines(folder, name)
        assert sorted(record["key"] for record in records) == sorted(prompt.key for prompt in prompts)
        assert all(record["reply_ids"] == engine.reply(record["prompt_ids"], 12) for record in records)


def test_ctrl_c_ends_a_run_at_once_with_one_line_and_what_came_is_kept(make_config, tiny, tmp_path):
    with serving(tiny_engine(tiny, delay_s=0.05)) as engine:
        config = served(make_config, engine.url, replies={"concurrency": 16}, **many(tmp_path))
        train = config.folder("replies") / "train.jsonl"
        process = start(config, tmp_path)
        wait_for_lines(train, 20, process)
        engine.delay_s = 600
        time.sleep(0.2)
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
        took = time.monotonic() - asked
        engine.delay_s = 0.0
        kept = {record["key"]: record for record in lines(config.folder("replies"), "train")}
        folder = run(config, tiny)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "eyas: interrupted, what was finished is kept; the same command resumes"
    assert "Traceback" not in errors
    assert took < 30  # a second, where the processor is free; the replies that were asked for take ten minutes
    assert len(kept) >= 20
    assert {record["key"]: record for record in lines(folder, "train")}.items() >= kept.items()
    assert set(SETS) == set(read_manifest(folder).holds["sets"])
