import socket

import pytest

from eval.clients import Client
from eyas.errors import EyasError

PROMPT = [5, 6, 7]


def test_a_streamed_reply_has_ids_counts_and_times(toy_server):
    with Client(toy_server.url) as client:
        reply = client.generate(PROMPT, 20, 0.0, 0, "result")
    cycles = toy_server.cycles("result", 20)
    assert list(reply.output_ids) == toy_server.reply(PROMPT, 20)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.finish_reason) == (3, 20, "length")
    assert reply.counts.verify_ct == len(cycles)
    assert reply.counts.correct == sum(cycles)
    assert reply.counts.proposed == 3 * len(cycles)
    assert reply.counts.histogram == tuple(cycles.count(accepted) for accepted in range(4))
    assert reply.counts.engine_length == pytest.approx(20 / len(cycles))
    assert reply.first_tokens == 1
    assert 0 < reply.first_token_s < reply.total_s
    assert reply.parts["counts"]["verify"] == len(cycles)


def test_a_stream_of_only_new_tokens_gives_the_same_reply_as_one_of_all_so_far(toy_server):
    with Client(toy_server.url) as client:
        whole = client.generate(PROMPT, 20, 0.0, 0, "result")
        toy_server.incremental = True
        assert client.generate(PROMPT, 20, 0.0, 0, "result").output_ids == whole.output_ids


def test_a_baseline_reply_has_no_counts(toy_server):
    with Client(toy_server.url) as client:
        assert client.generate(PROMPT, 5, 0.0, 0, "none").counts is None


def test_the_seed_is_sent_only_when_something_is_sampled(toy_server):
    with Client(toy_server.url) as client:
        client.generate(PROMPT, 2, 0.0, 11, "none")
        client.generate(PROMPT, 2, 0.7, 11, "none")
    greedy, sampled = (body["sampling_params"] for path, body in toy_server.log if path == "/generate")
    assert greedy == {"max_new_tokens": 2, "temperature": 0.0}
    assert sampled["sampling_seed"] == 11


def test_older_field_names_are_understood(plain_servers):
    _, server = plain_servers
    newer = server.RequestHandlerClass._meta
    names = {"spec_num_correct_drafts": "spec_accept_token_num", "spec_num_proposed_drafts": "spec_draft_token_num"}
    names["spec_correct_drafts_histogram"] = "spec_accept_histogram"

    class Older(server.RequestHandlerClass):
        def _meta(self, *arguments):
            return {names.get(name, name): value for name, value in newer(self, *arguments).items()}

    with Client(server.url) as client:
        expected = client.generate(PROMPT, 20, 0.0, 0).counts
        server.RequestHandlerClass = Older
        assert client.generate(PROMPT, 20, 0.0, 0).counts == expected


def test_a_chat_carries_the_acceptance_of_its_request(toy_server):
    with Client(toy_server.url) as client:
        reply = client.chat([{"role": "user", "content": "hello"}], 20, 0.0, "starter")
    assert (reply.prompt_tokens, reply.completion_tokens, reply.text) == (5, 20, "hi")
    assert reply.counts.verify_ct == len(toy_server.cycles("starter", 20))


def test_a_server_that_is_not_there_is_one_clear_line():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(EyasError, match=rf"no server answers at http://127.0.0.1:{port}"):
        client.ready()


def test_an_error_answer_is_one_line_with_the_servers_own_words(toy_server):
    toy_server.break_after = 0
    with Client(toy_server.url) as client, pytest.raises(EyasError) as caught:
        client.generate(PROMPT, 20, 0.0, 0, "none")
    assert str(caught.value) == f"{toy_server.url}/generate answered 500: CUDA error: out of memory"


def test_a_server_that_dies_in_the_middle_of_a_reply_is_one_clear_line(toy_server):
    toy_server.break_after, toy_server.failure = 0, "death"
    with Client(toy_server.url) as client, pytest.raises(EyasError, match="stream ended before the reply was finished"):
        client.generate(PROMPT, 20, 0.0, 0, "none")


def test_an_aborted_request_is_no_reply(toy_server):
    whole = toy_server.RequestHandlerClass._meta

    class Aborting(toy_server.RequestHandlerClass):
        def _meta(self, *arguments):
            meta = whole(self, *arguments)
            return meta | {"finish_reason": meta["finish_reason"] and {"type": "abort", "message": "out of KV cache"}}

    toy_server.RequestHandlerClass = Aborting
    with Client(toy_server.url) as client, pytest.raises(EyasError, match=r"/generate aborted the request: out of KV cache$"):
        client.generate(PROMPT, 20, 0.0, 0, "none")


def test_a_server_that_hangs_is_given_up_on():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2) as client, pytest.raises(EyasError, match="hangs"):
            client.ready()


def test_another_kind_of_server_is_named_as_such(toy_server):
    with Client(toy_server.url + "/other") as client, pytest.raises(EyasError, match="/health_generate answered 404: Not Found"):
        client.ready()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(EyasError, match="expected http://HOST:PORT"):
        Client(url)


def test_a_server_that_clears_up_behind_a_reply_is_asked_again_to_flush(toy_server):
    toy_server.busy = 2
    with Client(toy_server.url) as client:
        client.flush_cache()
    assert [path for path, _ in toy_server.log if path == "/flush_cache"] == ["/flush_cache"] * 3


def test_a_server_that_never_flushes_is_named(toy_server, monkeypatch):
    monkeypatch.setattr("eval.clients.FLUSH_LIMIT_S", 0.1)
    toy_server.busy = 10**6
    with Client(toy_server.url) as client, pytest.raises(EyasError, match=r"/flush_cache answered 400: .*Flush cache failed"):
        client.flush_cache()
