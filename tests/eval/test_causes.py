"""The likely cause of a death, from what engines really say when they die."""

import pytest

from eval.causes import exit_text, last_error, likely_cause
from eval.starts import End

ECHO = [
    "[2026-11-30 22:40:43] Received sigquit from a child process. It usually means the child failed.",
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1). If exit code is -9 (SIGKILL), a common cause is the OS OOM "
    "killer. Run `dmesg -T | grep -i oom` to check.",
]
TRACE = ["[2026-11-30 22:40:40 TP0] Scheduler hit an exception: Traceback (most recent call last):", '  File "x.py", line 1, in load']
WARNINGS = [
    "[2026-11-30 22:36:27] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'",
    "[2026-11-30 22:36:42] OpenAI Responses API disabled: (ModuleNotFoundError: No module named 'openai_harmony')",
    "WARNING: file tokenizer.model does not exist, using the fast tokenizer",
]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of", "out of GPU memory"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "no GPU memory left for the cache"),
        ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-", "no GPU memory left for the cache"),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu", "no GPU memory left for the cache"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried", "out of memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out of memory"),
        ("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use", "port taken"),
        ("OSError: [Errno 98] Address already in use", "port taken"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any network address. EADDRINUSE", "port taken"),
        ("cannot listen on 127.0.0.1:30000: Address already in use; choose another engine.port", "port taken"),
        ("launch_server.py: error: unrecognized arguments: --no-such-flag 1", "bad flag"),
        ("sglang serve: error: argument --dtype: invalid choice: 'float8' (choose from 'auto', 'half')", "bad flag"),
        ("/usr/bin/python3: Error while finding module specification for 'sglang.x' (No module named 'sglang')", "missing module"),
        ("/usr/bin/python3: No module named sglang", "missing module"),
        ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory", "missing module"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/x/model-00002-of-00064.safetensors'", "missing or broken file"),
        ("OSError: /x/target does not appear to have a file named config.json.", "missing or broken file"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata", "missing or broken file"),
        ("OSError: owner/name is not a local folder and is not a valid model identifier", "missing or broken file"),
        ("AssertionError: draft_vocab_size 100 does not divide", "bad drafter"),
        ("ValueError: Warning: Target model's context_length (4096) is greater than the derived context_length", "bad drafter"),
    ],
)  # fmt: skip
def test_what_an_engine_says_names_the_cause_whatever_else_it_says(said: str, name: str) -> None:
    cause = likely_cause(End(None, "SIGKILL"), [*WARNINGS, *TRACE, said, *ECHO], "weights", oom_kills=0)
    assert cause is not None
    assert cause.name == name
    assert cause.line == said


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ([*TRACE, "ValueError: the reason", *ECHO], "ValueError: the reason"),
        (["(EngineCore pid=9) ERROR 11-30 22:33:16 [core.py:1] ValueError: the reason", ECHO[1]], "ValueError: the reason"),
        (["drafter folder x does not exist"], "drafter folder x does not exist"),
        (["[2026-11-30 22:36:27] Load weight begin.", "", "  "], "Load weight begin."),
        (ECHO, ECHO[1]),
        ([], None),
    ],
)
def test_the_line_that_says_it_is_found(said: list[str], line: str | None) -> None:
    assert last_error(said) == line


def test_an_error_while_the_drafter_loads_is_the_drafters() -> None:
    said = ["RuntimeError: The size of tensor a (576) must match the size of tensor b (512)"]
    drafter = likely_cause(End(1), said, "drafter weights")
    assert drafter is not None
    assert drafter.name == "bad drafter"
    assert likely_cause(End(1), said, "weights") is None
    missing = likely_cause(End(1), ["FileNotFoundError: [Errno 2] No such file or directory: 'x'"], "drafter weights")
    assert missing is not None
    assert missing.name == "bad drafter"
    assert "missing or broken file" in missing.advice


@pytest.mark.parametrize(
    ("end", "said", "oom_kills", "told"),
    [
        (End(None, "SIGKILL"), [], 1, "out of memory: the kernel has ended a process"),
        (End(None, "SIGKILL"), [], 0, "killed from outside: somebody sent SIGKILL, and it was not the kernel for lack of memory"),
        (End(None, "SIGKILL"), [], None, "killed from outside: somebody sent SIGKILL"),
        (End(1), ["RuntimeError: Rank 3 scheduler died during initialization (exit code: -9). If exit code is"], 2, "out of memory"),
        (End(1), ["RuntimeError: Rank 3 scheduler died during initialization (exit code: -9). If exit code is"], 0, "killed from outside"),
    ],
)
def test_a_kill_is_the_kernels_only_when_it_counted_one(end: End, said: list[str], oom_kills: int | None, told: str) -> None:
    assert str(likely_cause(end, said, "weights", oom_kills)).startswith(told)


def test_where_nothing_points_anywhere_no_cause_is_made_up() -> None:
    assert likely_cause(End(3), [*WARNINGS, "[2026-11-30 22:36:27] Load weight begin."], "weights", 1) is None


def test_exits_are_told_in_words() -> None:
    assert exit_text(End(3)) == "exit code 3"
    assert exit_text(End(None, "SIGSEGV")) == "killed by SIGSEGV"
    assert exit_text(End(None, error="python9: No such file")) == "it could not be started: python9: No such file"
    assert "keeper" in exit_text(None)
