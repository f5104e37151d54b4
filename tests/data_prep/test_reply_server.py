"""Servers answer, go wrong in every way and die; the replies are exactly those that were generated, each prompt's once."""

import random
import re
import resource
import socket
import threading
import time
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from data_prep.prompts import Unusable
from data_prep.reply_server import Chats, answer_by_server
from data_prep.reply_wire import Answer, Asking
from data_prep.sampler import Request, Sampling
from data_prep.template import prompt_ids
from eyas.config import RepliesConfig
from eyas.errors import EyasError
from eyas.progress import Task
from tests.data_prep.conftest import CHATML
from tests.data_prep.reply_engine import STOP, ReplyEngine, reply_to, serving

ROOT = Path(__file__).parents[2]
OWNERS = ["sglang", "vllm"]
QUICK = {"give_up_s": 30, "timeout_s": 60}


def requests(count, limit=16):
    return [Request(f"prompt-{number}", [11 + number % 50, 70 + number // 50, 12], limit) for number in range(count)]


def ask(asked, *urls, temperature=1.0, top_p=1.0, chats=None, tokenizer=None, take=None, **settings):
    """Outcomes by key, each handed over once, and the lines that were printed."""
    outcomes = {}

    def keep(request, outcome):
        assert request.key not in outcomes
        outcomes[request.key] = outcome
        if take is not None:
            take(request, outcome)

    printed = StringIO()
    config = RepliesConfig(mode="server", servers=list(urls), **QUICK | settings)
    asking = Asking(Sampling((temperature,), top_p, 0, "test"), (STOP,), tokenizer)
    with Task("replies", len(asked), "replies", console=Console(file=printed, width=500)) as task:
        answer_by_server(asked, urls, asking, chats or Chats([], {}), config, keep, task)
    return outcomes, printed.getvalue()


def exact(asked):
    """What the engine generates for each request."""
    replies = {request.key: reply_to(request.prompt_ids, request.max_new_tokens) for request in asked}
    return {key: Answer(ids, "stop" if ids[-1] == STOP else "length") for key, ids in replies.items()}


@pytest.mark.parametrize("owner", OWNERS)
def test_two_thousand_prompts_at_512_in_flight_come_back_exactly_whatever_goes_wrong(owner):
    chooser = random.Random(0)
    faults = ["drop", "cut", 500, 502, 429, "garbled", "foreign", "abort"]
    seen = Counter()

    def fault(ids):
        chosen = chooser.choice(faults) if chooser.random() < 0.2 else None
        seen[chosen] += 1
        return chosen

    asked = requests(2000)
    engine, other = (ReplyEngine(owner, fault=fault, headers={"retry-after": "0"}, hold=256) for _ in range(2))
    with serving(engine), serving(other):
        outcomes, _ = ask(asked, engine.url, other.url, concurrency=512)
    assert outcomes == exact(asked)
    assert min(seen[kind] for kind in faults) > 20
    assert set((engine.answered + other.answered).values()) <= {1}
    # 256 each at first; a server that asks for a pause leaves its share to the other
    assert all(256 <= server.most_in_flight <= 512 for server in (engine, other))


@pytest.mark.parametrize("owner", OWNERS)
def test_a_request_says_how_to_sample_and_leaves_nothing_to_the_servers_defaults(owner):
    asked = requests(3)
    with serving(ReplyEngine(owner)) as engine:
        ask(asked, engine.url, temperature=0.7, top_p=0.9)
        ask(asked[:1], engine.url, temperature=0.0)
    bodies = [body.get("sampling_params", body) for body in engine.bodies]
    shared = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [STOP]}
    assert [{key: body[key] for key in shared} for body in bodies] == [shared] * 4
    assert [(body["temperature"], body["top_p"]) for body in bodies] == [(0.7, 0.9)] * 3 + [(0.0, 1.0)]
    sampling, seed = Sampling((0.7,), 0.9, 0, "test"), {"sglang": "sampling_seed", "vllm": "seed"}[owner]
    assert {body[seed] for body in bodies[:3]} == {sampling.draw_seed(request) for request in asked}
    assert seed not in bodies[3]


def test_a_busy_server_is_left_alone_as_long_as_it_asks():
    times = []

    def fault(ids):
        times.append(time.monotonic())
        return 429 if len(times) == 1 else None

    with serving(ReplyEngine(fault=fault, headers={"Retry-After": "1"})) as engine:
        outcomes, _ = ask(requests(1), engine.url, retries=1)
    assert outcomes == exact(requests(1))
    assert 1.0 <= times[1] - times[0] < 3


def test_a_server_gets_no_more_requests_than_it_has_room_for_and_refusals_cost_no_tries():
    refused = Counter()

    def fault(ids):
        full = engine.in_flight > 8
        refused[full] += 1
        return 429 if full else None

    engine = ReplyEngine(fault=fault, headers={"retry-after": "0"}, delay_s=0.01)
    with serving(engine):
        outcomes, _ = ask(requests(300), engine.url, concurrency=64, retries=0)
    assert outcomes == exact(requests(300))
    assert refused[True] < 200


def test_a_server_that_stalls_costs_its_requests_timeout_s_and_no_more():
    sent = Counter()

    def fault(ids):
        sent[str(ids)] += 1
        return "stall" if ids[0] % 5 == 0 and sent[str(ids)] == 1 else None

    with serving(ReplyEngine(fault=fault)) as engine:
        outcomes, _ = ask(requests(40), engine.url, timeout_s=1.0)
    assert outcomes == exact(requests(40))
    assert max(sent.values()) == 2


def test_when_one_of_two_servers_dies_the_other_answers_and_when_it_is_back_it_is_used_again():
    asked, taken = requests(600), []
    dying, living, back = (ReplyEngine(delay_s=0.02) for _ in range(3))
    born, died, again, ended = (threading.Event() for _ in range(4))

    def life():
        with serving(dying):
            born.set()
            died.wait()
        again.wait()
        with serving(back, port=int(dying.url.rpartition(":")[2])):
            ended.wait()

    def take(request, outcome):
        taken.append(request.key)
        if len(taken) == 100:
            died.set()
        if len(taken) == 300:
            again.set()
        # too slow to answer everything before the other is back
        living.delay_s = 2.0 if again.is_set() and not back.answered else 0.02

    thread = threading.Thread(target=life)
    thread.start()
    born.wait()
    with serving(living):
        try:
            outcomes, printed = ask(asked, dying.url, living.url, concurrency=8, take=take)
        finally:
            for event in (died, again, ended):
                event.set()
            thread.join()
    assert outcomes == exact(asked)
    assert printed.count(f"{dying.url} is taken out until it answers again: the connection was lost") == 1
    assert f"{dying.url} answers again" in printed
    assert back.answered.total() > 0


def test_when_all_servers_are_gone_the_run_ends_in_one_line_and_what_came_was_handed_over():
    asked, taken = requests(200), []
    engine = ReplyEngine()
    serve = serving(engine)
    serve.__enter__()

    def take(request, outcome):
        taken.append(request.key)
        if len(taken) == 50:
            serve.__exit__(None, None, None)

    with pytest.raises(EyasError, match=r"no reply server has answered for 1 s \(http://127.0.0.1:\d+: the connection was lost") as error:
        ask(asked, engine.url, concurrency=4, give_up_s=1, take=take)
    assert "\n" not in str(error.value)
    assert 50 <= len(taken) < 60


def test_more_requests_in_flight_than_files_may_be_open_raise_the_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with serving(ReplyEngine()) as engine:
            ask(requests(10), engine.url, concurrency=300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_without_a_living_server_does_not_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EyasError, match=f"no reply server answers \\({url}: the connection was lost.*correct prep.replies.servers"):
            ask(requests(2), url)


def test_of_several_servers_one_living_is_enough_to_start():
    with socket.socket() as taken, serving(ReplyEngine()) as engine:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        outcomes, printed = ask(requests(20), url, f"{engine.url}/v1")
    assert outcomes == exact(requests(20))
    assert f"{url} is taken out until it answers again" in printed


@pytest.mark.parametrize(
    ("fault", "reason", "sent"),
    [
        (400, "refused by the server (400)", 1),
        ("filter", "ended by the server: content_filter", 1),
        ("abort", "aborted by the server", 3),
        (500, "a server answered an error", 3),
        ("foreign", "what the server sent is no reply", 3),
        ("drop", "the connection was lost", 3),
    ],
)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_prompt_that_cannot_be_answered_is_given_up_with_the_reason_and_the_others_are_not(owner, fault, reason, sent):
    asked = requests(30)
    poisoned = asked[7].prompt_ids
    with serving(ReplyEngine(owner, fault=lambda ids: fault if ids == poisoned else None)) as engine:
        outcomes, printed = ask(asked, engine.url, retries=2, concurrency=4)
    failed = outcomes.pop("prompt-7")
    assert isinstance(failed, Unusable)
    assert str(failed) == reason
    assert outcomes == {key: answer for key, answer in exact(asked).items() if key != "prompt-7"}
    assert sum((body.get("input_ids") or body.get("prompt")) == poisoned for body in engine.bodies) == sent
    assert printed.count("a prompt is left unanswered") == 1


def test_a_prompt_that_is_refused_when_it_is_alone_is_given_up_too():
    asked = requests(30)
    poisoned = asked[7].prompt_ids
    with serving(ReplyEngine(fault=lambda ids: 503 if ids == poisoned else None)) as engine:
        outcomes, _ = ask(asked, engine.url, retries=2, concurrency=4)
    assert str(outcomes.pop("prompt-7")) == "no server had room for it"
    assert outcomes == {key: answer for key, answer in exact(asked).items() if key != "prompt-7"}


def test_a_stop_token_that_a_server_keeps_back_is_put_behind_the_reply():
    def trim(said):
        if said["output_ids"][-1] == STOP:
            said["output_ids"].pop()
            said["meta_info"]["finish_reason"]["matched"] = STOP

    with serving(ReplyEngine(alter=trim)) as engine:
        outcomes, _ = ask(requests(20), engine.url)
    assert outcomes == exact(requests(20))


def test_a_reply_that_stops_at_no_end_token_of_the_target_makes_no_row():
    with serving(ReplyEngine(alter=lambda said: said["output_ids"].append(42))) as engine:
        outcomes, _ = ask(requests(1), engine.url)
    assert str(outcomes["prompt-0"]) == "stopped without an end token of the target"


@pytest.mark.parametrize(
    ("owner", "change"),
    [
        ("sglang", lambda said: said["meta_info"].update(prompt_tokens=4)),
        ("vllm", lambda said: said["choices"][0].update(prompt_token_ids=[1, 2, 3])),
    ],
)
def test_a_server_that_changes_prompts_ends_the_run(owner, change):
    with serving(ReplyEngine(owner, alter=change)) as engine, pytest.raises(EyasError, match="it changes prompts"):
        ask(requests(1), engine.url)


def test_a_context_too_small_is_told_before_anything_is_sent():
    with serving(ReplyEngine(context=18)) as engine:
        with pytest.raises(EyasError, match=r"http://127.*: it serves 18 tokens of prompt and reply together, 19 are needed"):
            ask(requests(1), engine.url)
        assert engine.bodies == []
        ask(requests(1, limit=15), engine.url)


def test_text_alone_is_tokenised_again_and_kept_only_where_it_comes_back_as_so_many_tokens(make_tokenizer):
    tokenizer = make_tokenizer()
    words = {
        11: tokenizer.encode("fine "),
        12: tokenizer.encode("über"),
        13: tokenizer.encode("ü")[:1],
        14: [*tokenizer.encode("odd"), 70],
    }
    engine = ReplyEngine("else", reply=lambda ids, limit: words[ids[0]][:limit])
    engine.text_of = lambda ids: "odd" if ids == words[14] else tokenizer.decode(ids)
    with serving(engine):
        outcomes, printed = ask([Request(str(first), [first, 5], 20) for first in words], engine.url, tokenizer=tokenizer)
    assert {key: outcome.ids for key, outcome in outcomes.items() if isinstance(outcome, Answer)} == {"11": words[11], "12": words[12]}
    assert {str(outcomes[key]) for key in ("13", "14")} == {"text that does not come back as the tokens it was made of"}
    assert printed.count("gives no token ids: its text is tokenised again") == 1


CHAT = [{"role": "user", "content": "hello"}]
DEFAULT_SYSTEM = CHATML.replace("{% for", "<|im_start|>system\nBe good.<|im_end|>\n{% for", 1)


@pytest.mark.parametrize("missing", [(), ("/tokenize",)])
def test_a_chat_template_that_differs_ends_the_run_and_one_that_does_not_passes(make_tokenizer, missing):
    ours, theirs = make_tokenizer(), make_tokenizer(DEFAULT_SYSTEM)
    chats = Chats([(CHAT, prompt_ids(ours, CHAT))], {})
    with serving(ReplyEngine(missing=missing, render=lambda body: prompt_ids(ours, body["messages"]))) as engine:
        assert len(ask(requests(2), engine.url, chats=chats, tokenizer=ours)[0]) == 2
    with serving(ReplyEngine(missing=missing, render=lambda body: prompt_ids(theirs, body["messages"]))) as engine:
        with pytest.raises(EyasError) as error:
            ask(requests(2), engine.url, chats=chats, tokenizer=ours)
        assert engine.bodies == []
    here, there = (len(prompt_ids(tokenizer, CHAT)) for tokenizer in (ours, theirs))
    assert f"{there} tokens" in str(error.value)
    assert f"that is {here} here" in str(error.value)
    if not missing:
        assert r"from token 1 on 'system\nB' and not 'user\nhel'" in str(error.value)


def test_a_server_that_renders_no_chats_is_used_and_said(make_tokenizer):
    chats = Chats([(CHAT, [1, 2])], {})
    with serving(ReplyEngine()) as engine:
        outcomes, printed = ask(requests(2), engine.url, chats=chats)
    assert outcomes == exact(requests(2))
    assert printed.count("cannot compare chat templates") == 1


def test_progress_tells_rate_finished_share_requests_in_flight_and_servers():
    with serving(ReplyEngine()) as engine:
        _, printed = ask(requests(20), engine.url)
    assert re.search(r"replies: 20/20 replies, .* replies/s, ETA .* tok/s, 100% finished, 0 in flight, 1/1 servers", printed)
