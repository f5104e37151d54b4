"""Capture's side of a serving engine. The engine is a stand-in: the tiny target behind HTTP, with the real plug-in's outbox behind it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import capture_request, capture_server
from data_prep.capture_hf import Probe, capture
from data_prep.capture_server import ServedCapture, Window, rounds
from data_prep.engine_plugin.host_copy import HostCopier
from data_prep.engine_plugin.orders import VARIABLE, CaptureJob, FlushOrder, RowOrder, read_order
from data_prep.engine_plugin.outbox import Outbox, Parcel
from data_prep.rows import Row
from data_prep.template import reply_row
from eyas.attention_hf import NAME
from eyas.errors import EyasError
from eyas.state_row import StateRow
from eyas.states import StateSpec, StateStore, finish_store, row_key
from tests.http_server import running

LAYERS = (1, 3, 5)


def make_row(ids: list[int]) -> Row:
    tokens = reply_row(ids[:2], ids[2:])
    return Row(row_key(tokens.ids, tokens.supervised), f"prompt {ids[:3]}", "chat", tokens)


@pytest.fixture
def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [make_row(torch.randint(250, (length,), generator=generator).tolist()) for length in (5, 60, 12, 33, 34, 7, 60, 21, 50, 3)]


@pytest.fixture
def spec(tiny) -> StateSpec:
    return StateSpec(LAYERS, tiny.shape.hidden_size, "bfloat16", tiny.shape.vocab_size, tiny.digest, tiny.tokenizer_digest)


class Engine:
    """A server like SGLang: /generate computes one request, hands its states to the outbox, and says the next token.

    What a test wants to go wrong: ``drop`` requests whose connection is closed unanswered, ``die_after`` requests from which on no row is
    answered, ``bend`` of the states [T, C], ``forget`` answers states instead of taking them, ``shift`` of the next token.
    """

    def __init__(self, target: Any) -> None:
        self._model = target.load_model(torch.float32, "cpu", NAME)
        self._guard = threading.Lock()
        self.drop, self.die_after, self.shift = 0, 10**9, 0
        self.bend: Callable[[RowOrder, torch.Tensor], torch.Tensor] = lambda order, states: states
        self.forget = False
        self.version = "0.5.23"
        self.starts: list[dict[str, Any]] = []
        self.orders: list[RowOrder | FlushOrder] = []

    @contextmanager
    def start(self, flags: dict[str, Any], environment: dict[str, str]) -> Iterator[str]:
        self.starts.append(flags)
        values = json.loads(environment[VARIABLE])
        spec = StateSpec(**{**values["spec"], "layers": tuple(values["spec"]["layers"])})
        outbox = Outbox(CaptureJob(Path(values["root"]), spec, values["shard_bytes"]), "sglang")
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer({"version": engine.version})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if engine.drop > 0:
                    engine.drop -= 1
                    self.close_connection = True
                    return
                with engine._guard:
                    self._answer(engine.generate(body, spec, outbox))

            def _answer(self, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
            yield f"http://127.0.0.1:{server.server_address[1]}"

    def generate(self, body: dict[str, Any], spec: StateSpec, outbox: Outbox) -> dict[str, Any]:
        order = read_order(body["sampling_params"]["custom_params"])
        assert order is not None
        assert body["return_hidden_states"] is True
        self.orders.append(order)
        if self.forget:
            return {"meta_info": {"hidden_states": [[[0.5, 0.25]]]}}
        if isinstance(order, FlushOrder):
            outbox.put(order)
            return {"meta_info": {"hidden_states": [[1.0]]}}
        if len([done for done in self.orders if isinstance(done, RowOrder)]) > self.die_after:
            outbox.fail("the engine is on fire")
            return {"meta_info": {"hidden_states": [[0.0]]}}
        row = make_row(body["input_ids"])
        with Probe(self._model, spec.layers) as probe, torch.inference_mode():
            aux, final = probe([row], 0)
            logits = self._model.lm_head(final[0, -1])
        copy = HostCopier()
        outbox.put(Parcel(order, body["input_ids"], [(copy(self.bend(order, aux[0])), copy(self.bend(order, final[0])))]))
        token = (int(logits.argmax()) + self.shift) % len(logits)
        return {
            "meta_info": {
                "hidden_states": [[1.0]],
                "output_token_logprobs": [[float(logits.log_softmax(-1)[token]), token, None]] if body["return_logprob"] else [],
            }
        }


@pytest.fixture
def engine(tiny) -> Engine:
    return Engine(tiny)


@pytest.fixture
def served(make_config, tiny, engine, monkeypatch):
    monkeypatch.setattr(capture_request, "BACK_OFF_S", 0.01)

    def make(**states: Any) -> ServedCapture:
        config = make_config(states={"backend": "hf", "recheck": 0.5, **states})
        section = config.engine.model_copy(update={"kind": "sglang", "dtype": "float32", "context": 128})
        states_section = config.prep.states.model_copy(update={"backend": "sglang"})
        prep = config.prep.model_copy(update={"states": states_section})
        return ServedCapture(config.model_copy(update={"engine": section, "prep": prep}), tiny, engine.start)

    return make


def contents(folder: Path) -> dict[str, StateRow]:
    finish_store(folder, {})
    store = StateStore(folder)
    return {key: store.read(place) for place, key in enumerate(store.keys)}


def test_the_store_is_what_capture_with_transformers_makes(served, engine, rows, spec, tiny, tmp_path):
    with served() as run:
        report = run(rows, tmp_path / "states" / "train", spec, "train")
    assert (report.tokens, report.quarantined) == (sum(len(row.tokens.ids) for row in rows), [])
    assert report.by == "sglang 0.5.23"
    assert report.rechecked >= 1
    assert report.worst_state < 2**-7
    assert report.worst_logit < 0.02
    model = tiny.load_model(torch.float32, "cpu", NAME)
    capture(model, tiny, rows, tmp_path / "hf", spec, served()._config.prep.states, "hf")
    ours, theirs = contents(tmp_path / "states" / "train"), contents(tmp_path / "hf")
    assert ours.keys() == theirs.keys()
    for key, row in ours.items():
        assert torch.equal(row.ids_T, theirs[key].ids_T)
        assert torch.equal(row.supervised_T, theirs[key].supervised_T)
        torch.testing.assert_close(row.aux_TA, theirs[key].aux_TA, rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(row.final_TH, theirs[key].final_TH, rtol=2**-7, atol=1e-3)
    assert not (tmp_path / "states" / "train.recheck").exists()


def test_one_server_does_for_all_sets_and_none_is_started_when_nothing_is_missing(served, engine, rows, spec, tmp_path):
    with served() as run:
        run(rows[:6], tmp_path / "states" / "train", spec, "train")
        run(rows[6:], tmp_path / "states" / "greedy", spec, "greedy")
    assert len(engine.starts) == 1
    with served() as run:
        assert run(rows[6:], tmp_path / "states" / "greedy", spec, "greedy").tokens == 0
    assert len(engine.starts) == 1
    assert engine.starts[0]["return-aux-hidden-state-layer-ids"] == [0, 2, 4]
    assert engine.starts[0]["disable-radix-cache"] is True


def test_other_layers_take_another_server(served, engine, rows, spec, tmp_path):
    other = StateSpec((2, 4), *list(vars(spec).values())[1:])
    with served() as run:
        run(rows[:2], tmp_path / "states" / "probe", other, "probe")
        run(rows[:2], tmp_path / "states" / "train", spec, "train")
    assert [start["return-aux-hidden-state-layer-ids"] for start in engine.starts] == [[1, 3], [0, 2, 4]]
    assert contents(tmp_path / "states" / "probe")[rows[0].key].aux_TA.shape[1] == 2 * spec.hidden_size


def test_what_an_interrupted_capture_stored_is_not_sent_again(served, engine, rows, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_server, "FIRST_ROUND", 4)
    folder = tmp_path / "states" / "train"
    engine.die_after = 7
    with pytest.raises(EyasError, match="on fire"), served(recheck=0.0) as run:
        run(rows, folder, spec, "train")
    kept = set(StateStore(folder, incomplete=True).keys)
    assert len(kept) == 4
    (folder / ".states-sglang_dead-00000.safetensors.1.tmp").write_bytes(b"half")
    (folder / "states-sglang_dead-00000.safetensors").write_bytes(b"without a sidecar")
    engine.die_after = 10**9
    engine.orders.clear()
    with served(recheck=0.0) as run:
        run(rows, folder, spec, "train")
    sent = [order.key for order in engine.orders if isinstance(order, RowOrder) and order.store == "train"]
    assert sorted(sent) == sorted({row.key for row in rows} - kept)
    assert contents(folder).keys() == {row.key for row in rows}
    assert list(folder.glob("*dead*")) == []


def test_lost_connections_are_tried_again_and_no_row_is_doubled(served, engine, rows, spec, tmp_path):
    engine.drop = 3
    with served() as run:
        run(rows, tmp_path / "states" / "train", spec, "train")
    assert contents(tmp_path / "states" / "train").keys() == {row.key for row in rows}


def test_a_server_that_is_gone_is_an_error(served, engine, rows, spec, tmp_path):
    engine.drop = 10**9
    with pytest.raises(EyasError, match="does not answer any more"), served() as run:
        run(rows, tmp_path / "states" / "train", spec, "train")


def test_a_server_without_the_plug_in_is_told_before_any_row_is_sent(served, engine, rows, spec, tmp_path):
    engine.forget = True
    with pytest.raises(EyasError, match="without eyas' plug-in"), served() as run:
        run(rows, tmp_path / "states" / "train", spec, "train")
    assert [type(order) for order in engine.orders] == [FlushOrder]


def test_a_version_that_reads_the_ids_otherwise_is_told(served, engine, rows, spec, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.capture_sglang.layers_from_written", lambda *_: (9, 9, 9))
    engine.version = "0.9.0"
    with pytest.raises(EyasError, match=r"SGLang 0.9.0 captures .*set engine.version to 0.9.0"), served() as run:
        run(rows, tmp_path / "states" / "train", spec, "train")


def test_states_that_differ_under_load_are_an_error(served, engine, rows, spec, tmp_path):
    engine.bend = lambda order, states: states.roll(1, 0) if order.store == "train" else states
    with pytest.raises(EyasError, match=r"hidden_states\[1\] captured under load differs from the row alone"), served() as run:
        run(rows, tmp_path / "states" / "train", spec, "train")


def test_a_final_state_that_does_not_give_the_servers_next_token_is_an_error(served, engine, rows, spec, tmp_path):
    engine.bend = lambda order, states: states.flip(0) if states.shape[1] == spec.hidden_size else states
    with pytest.raises(EyasError, match="lm_head of its last final state"), served() as run:
        run(rows, tmp_path / "states" / "train", spec, "train")


def test_rows_that_are_not_finite_are_quarantined(served, engine, rows, spec, tmp_path):
    bad = rows[3]
    engine.bend = lambda order, states: torch.full_like(states, float("inf")) if order.key == bad.key else states
    with served(recheck=1.0) as run:
        report = run(rows, tmp_path / "states" / "train", spec, "train")
    assert [(fault.prompt_key, fault.reason) for fault in report.quarantined] == [(bad.prompt_key, "states not finite")]
    assert contents(tmp_path / "states" / "train").keys() == {row.key for row in rows} - {bad.key}


def test_a_row_too_long_for_the_server_is_told_before_it_starts(served, engine, spec, tmp_path):
    with pytest.raises(EyasError, match=r"has 121 tokens, a server with engine.context 128 takes 120"), served() as run:
        run([make_row(list(range(1, 122)))], tmp_path / "states" / "train", spec, "train")
    assert engine.starts == []


def test_rows_of_other_replies_are_refused(served, engine, rows, spec, tmp_path):
    with served() as run:
        run(rows[:3], tmp_path / "states" / "train", spec, "train")
        with pytest.raises(EyasError, match="rows that the replies do not have"):
            run(rows[3:], tmp_path / "states" / "train", spec, "train")


def test_a_fault_shows_after_a_few_rows_and_rounds_keep_the_order(rows, monkeypatch):
    monkeypatch.setattr(capture_server, "FIRST_ROUND", 2)
    monkeypatch.setattr(capture_server, "ROUND_TOKENS", 70)
    parts = list(rounds(rows))
    assert [len(part) for part in parts] == [2, 3, 3, 2]
    assert [row.key for part in parts for row in part] == [row.key for row in rows]


async def _most_under_way(sizes: list[int]) -> tuple[int, int]:
    import asyncio

    window, now, most = Window(3, 10), [0, 0], [0, 0]

    async def one(size: int) -> None:
        now[0] += 1
        now[1] += size
        most[:] = map(max, most, now)
        await asyncio.sleep(0.001)
        now[0] -= 1
        now[1] -= size
        await window.leave(size)

    async with asyncio.TaskGroup() as group:
        for size in sizes:
            await window.enter(size)
            group.create_task(one(size))
    return most[0], most[1]


def test_no_more_rows_and_tokens_are_under_way_than_the_window_lets_but_any_row_gets_through():
    import asyncio

    assert asyncio.run(_most_under_way([1] * 9)) == (3, 3)
    assert asyncio.run(_most_under_way([5] * 5)) == (2, 10)
    assert asyncio.run(_most_under_way([50, 50, 1])) == (1, 50)
