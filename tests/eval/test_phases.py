"""Phases of a start, read from lines that the engines' logs really hold (SGLang 0.5.23, vLLM 0.32)."""

import time

import pytest

from eval.phases import Phases, parse

SGLANG = """\
/x/sglang/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still supported
[2026-11-30 22:38:24] The current platform does not support Intel AMX, will fallback to torch_native backend.
[2026-11-30 22:38:29] server_args={'model_path': '/x/target', 'max_total_num_tokens': None}
[2026-11-30 22:39:16 TP0] Init parallel begin.
[2026-11-30 22:39:17 TP0] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'
[2026-11-30 22:39:30 TP0] Load weight begin. avail mem=16.03 GB
[2026-11-30 22:39:31 TP1] Load weight begin. avail mem=16.03 GB
Multi-thread loading shards:   0% Completed | 0/64 [00:00<?, ?it/s]
Multi-thread loading shards:  50% Completed | 32/64 [00:02<00:00,  2.66s/it]
[2026-11-30 22:39:36 TP0] Load weight end. elapsed=6.00 s, type=KimiK25ForConditionalGeneration, avail mem=15.44 GB, mem usage=0.59 GB.
[2026-11-30 22:39:39 TP0] KV Cache is allocated. dtype: torch.float32, #tokens: 8192, K size: 0.18 GB, V size: 0.18 GB
[2026-11-30 22:39:39 TP0] Memory pool end. avail mem=14.59 GB
[2026-11-30 22:39:40 TP0] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=14.59 GB
Capturing batches (bs=4 avail_mem=14.1 GB):  25%|##5       | 1/4 [00:01<00:03,  1.00s/it]
[2026-11-30 22:39:44 TP0] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=4.00 s, mem usage=0.5 GB, avail mem=14.0 GB.
[2026-11-30 22:39:45 TP0] Load weight begin. avail mem=14.0 GB
[2026-11-30 22:39:47 TP0] Load weight end. elapsed=2.00 s, type=LlamaForCausalLMEagle3, avail mem=13.0 GB, mem usage=1.0 GB.
[2026-11-30 22:39:48 TP0] max_total_num_tokens=8192, chunked_prefill_size=4096, max_running_requests=4, context_len=2048
[2026-11-30 22:39:49] INFO:     Started server process [15307]
[2026-11-30 22:39:53] The server is fired up and ready to roll!"""

VLLM = """\
(APIServer pid=12769) INFO 11-30 22:33:03 [model.py:2152] Using max model len 8192
(EngineCore pid=13139) INFO 11-30 22:33:16 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='x'
(Worker_TP0 pid=13269) INFO 11-30 22:33:32 [cpu_model_runner.py:68] Starting to load model x...
Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:02<00:00,  2.19s/it]
(Worker_TP0 pid=13269) INFO 11-30 22:33:35 [default_loader.py:501] Loading weights took 2.22 seconds
(Worker_TP0 pid=13269) INFO 11-30 22:33:37 [cpu_model_runner.py:75] Loading drafter model...
(Worker_TP1 pid=13270) INFO 11-30 22:33:38 [cpu_model_runner.py:68] Starting to load model x...
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  2.39it/s]
(EngineCore pid=13139) INFO 11-30 22:33:39 [utils.py:347] Using LBHNC KV cache layout.
(EngineCore pid=13139) INFO 11-30 22:33:39 [kv_cache_utils.py:2327] CPU KV cache size: 22,528 tokens, Maximum concurrency 11.00x
(EngineCore pid=13139) INFO 11-30 22:33:40 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.82 s
(APIServer pid=12769) INFO 11-30 22:33:43 [entry.py:140] Starting vLLM server on http://127.0.0.1:8902
INFO:     Application startup complete."""


def at(text: str) -> float:
    return time.mktime(time.strptime(f"2026-11-30 {text}", "%Y-%m-%d %H:%M:%S"))


def names(kind: str, log: str, begun_at: float) -> tuple[Phases, list[str]]:
    """All of a log read as one of before, and the phases in their order."""
    phases, order = Phases(kind, begun_at), ["begin"]
    for line in log.splitlines():
        phases.read(line)
        order += [phases.name] if phases.name != order[-1] else []
    return phases, order


def test_sglang_goes_through_its_phases_with_their_durations() -> None:
    phases, order = names("sglang", SGLANG, at("22:38:20"))
    assert order == [
        "begin", "process groups", "weights", "memory pool", "graph capture", "drafter weights", "memory pool", "warm-up", "first token",
    ]  # fmt: skip
    assert phases.seconds(at("22:39:55")) == {
        "begin": 56.0,
        "process groups": 14.0,
        "weights": 6.0,
        "memory pool": 5.0,
        "graph capture": 5.0,
        "drafter weights": 2.0,
        "warm-up": 5.0,
        "first token": 2.0,
    }


def test_vllm_goes_through_its_phases() -> None:
    phases, order = names("vllm", VLLM, at("22:33:00"))
    assert order == ["begin", "process groups", "weights", "drafter weights", "memory pool", "warm-up", "first token"]
    assert phases.seconds(at("22:33:45"))["weights"] == 5.0


def test_the_embedded_engine_tells_its_phases_too() -> None:
    said = {"01": "loading the target", "03": "loading drafter starter (1 of 2)", "04": "serving x on http://127.0.0.1:5 with starter"}
    log = "\n".join(f"[2026-11-30 10:00:{second}] {text}" for second, text in said.items())
    phases, order = names("embedded", log, at("10:00:00"))
    assert order == ["begin", "weights", "drafter weights", "first token"]
    assert phases.seconds(at("10:00:04")) == {"begin": 1.0, "weights": 2.0, "drafter weights": 1.0, "first token": 0.0}


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["[2026-11-30 22:39:27] Load weight begin.", "Multi-thread loading shards:  50% Completed | 32/64 [00:02<00:00]"], (32, 64)),
        (
            ["[2026-11-30 22:39:27] Capture draft decode CUDA graph begin.", "Capturing batches (bs=8):  25%|##   | 1/4 [00:01<00:03]"],
            (1, 4),
        ),
        (["[2026-11-30 22:39:27] Memory pool end.", "other things:  50% Completed | 1/2 [00:02<00:00]"], (None, None)),
    ],
)
def test_what_is_counted_is_told(lines: list[str], count: tuple[int | None, int | None]) -> None:
    phases, _ = names("sglang", "\n".join(lines), at("22:39:00"))
    assert (phases.done, phases.total) == count


def test_a_count_ends_with_its_phase() -> None:
    phases, _ = names("sglang", "Load weight begin.\nx:  50% Completed | 32/64 [\nLoad weight end.", at("22:39:00"))
    assert (phases.name, phases.done) == ("memory pool", None)


def test_a_line_without_time_is_of_now_or_of_before() -> None:
    live, old = Phases("sglang", 100.0), Phases("sglang", 100.0)
    live.read("Load weight begin.", now=110.0)
    old.read("Load weight begin.")
    assert (live.since, old.since) == (110.0, 100.0)


@pytest.mark.parametrize("stamp", ["2026-11-30 03:39:20", "2031-01-01 00:00:00"])
def test_a_clock_of_another_zone_is_not_believed(stamp: str) -> None:
    phases = Phases("sglang", at("22:39:00"))
    phases.read(f"[{stamp}] Load weight begin.", now=at("22:39:10"))
    assert phases.since == at("22:39:10")


def test_heads_of_loggers_are_taken_off() -> None:
    assert parse("[2026-11-30 22:38:24 DP1 TP3] Hello", 0.0).text == "Hello"
    assert not parse("[2026-11-30 22:38:24 DP1 TP3] Hello", 0.0).first_rank
    vllm = parse("(EngineCore pid=13139) ERROR 11-30 22:33:16 [core.py:1] ValueError: x", at("10:00:00"))
    assert (vllm.text, vllm.at, vllm.first_rank) == ("ValueError: x", at("22:33:16"), True)
