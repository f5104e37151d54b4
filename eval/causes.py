"""Why a server died, from its exit, the last lines of its log and what it was doing: one sentence of cause, one of what to do."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eval.phases import DRAFTER, parse
from eval.starts import End

_ERROR = re.compile(
    r"(?:\w+: )?(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?::|$)|.*: error: |(?:ERROR|CRITICAL|FATAL)\b"
    r"|\S+: (?:No module named |Error while finding module |can't open file )",  # the interpreter's own
    re.ASCII,
)
# What an engine's main process says when one of its workers has already said why.
_ECHO = re.compile(
    r"scheduler died during initialization|Initialization failed\. Please see|Engine core initialization failed|See root cause above"
    r"|It usually means (?:the|one) child failed|WorkerProc initialization failed|^SystemExit|^KeyboardInterrupt|EngineDeadError"
)


_WORKER_KILLED = re.compile(r"exit ?code:? -9\b")


@dataclass(frozen=True)
class Cause:
    """The likely cause of a death."""

    name: str
    advice: str
    line: str | None = None
    """The line of the log that shows it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.advice}" if self.advice else self.name


@dataclass(frozen=True)
class _Rule:
    name: str
    shows: re.Pattern[str]
    advice: str


_GPU_MEMORY = _Rule(
    "out of GPU memory",
    re.compile(r"OutOfMemoryError|(?:CUDA|HIP) (?:error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|ncclUnhandledCudaError.*memory"),
    "see with nvidia-smi what else holds it; else lower the memory fraction, the context or the batch of graph capture in engine.flags",
)
_POOL = _Rule(
    "no GPU memory left for the cache",
    re.compile(
        r"Not enough memory\. Please try to increase|leave no GPU memory for the KV cache|No available memory for the cache blocks"
        r"|larger than the available KV cache memory|less than desired GPU memory utilization"
    ),
    "raise the memory fraction in engine.flags, lower engine.context, or see with nvidia-smi what else holds memory",
)
_MEMORY = _Rule(
    "out of memory",
    re.compile(r"\bMemoryError\b|can't allocate memory|Cannot allocate memory|std::bad_alloc|cudaHostAlloc.*failed"),
    "this machine (or its container's limit) has too little for this model",
)
_PORT = _Rule(
    "port taken",
    re.compile(
        r"address already in use|EADDRINUSE|cannot listen on|port \d+ is (?:already )?(?:in use|taken|not available)", re.IGNORECASE
    ),
    "choose another engine.port, or 0 for a free one",
)
_FLAG = _Rule(
    "bad flag",
    re.compile(r"error: (?:unrecognized arguments?|ambiguous option|argument .*|the following arguments are required)"),
    "mend engine.flags or engine.draft_flags; this version of the engine does not take it",
)
_MODULE = _Rule(
    "missing module",
    re.compile(r"No module named |ImportError: |error while loading shared libraries|cannot open shared object file"),
    "engine.python is not an interpreter that has the engine with all it needs",
)
_FILE = _Rule(
    "missing or broken file",
    re.compile(
        r"FileNotFoundError|No such file or directory|does not appear to have a file named|Cannot find any model weights"
        r"|is not a local folder and is not a valid model identifier|RepositoryNotFoundError|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|SafetensorError|HeaderTooLarge|IncompleteBuffer|does not exist|HFValidationError|[Mm]issing .*(?:shard|safetensors)"
        r"|Unable to load (?:config|weights|vocabulary)|couldn't connect to"
    ),
    "see that the folder of target and drafter is whole, or that the hub can be reached",
)
_DRAFTER = _Rule(
    "bad drafter",
    re.compile(
        r"llama_eagle3|Target model's context_length|[Ss]peculative|[Dd]raft(?:er|_| )|eagle_aux_hidden_state"
        r"|size mismatch for (?:fc|midlayer|layers\.0|d2t|lm_head)\b",
    ),
    "`eyas inspect` tells what its folder holds; `eyas export` writes one that this engine loads",
)
# Shown anywhere near the end, these say it all; the others are also words of harmless warnings, and count in an error's own line only.
_PLAIN = (_GPU_MEMORY, _POOL, _FLAG, _PORT)
_RULES = (*_PLAIN, _MEMORY, _MODULE, _FILE)


def exit_text(end: End | None) -> str:
    """The exit in a few words."""
    if end is None:
        return "no exit code, its keeper was killed too"
    if end.error is not None:
        return f"it could not be started: {end.error}"
    return f"exit code {end.code}" if end.signal is None else f"killed by {end.signal}"


def last_error(lines: Sequence[str]) -> str | None:
    """The line that says what went wrong: the last error that is no echo of a worker's, else the last line."""
    return next(iter(_errors(lines)), None)


def likely_cause(end: End | None, lines: Sequence[str], phase: str, oom_kills: int | None = None) -> Cause | None:
    """What probably ended a server; None when nothing points anywhere.

    Args:
        end: how its main process ended.
        lines: the end of its log.
        phase: what it was doing (``eval.phases``).
        oom_kills: processes that the kernel ended for lack of memory since the server began; None when it does not count.
    """
    errors = _errors(lines)
    for rules, shown in ((_PLAIN, list(reversed(lines))), (_RULES, errors)):
        for line in shown:
            if rule := next((rule for rule in rules if rule.shows.search(line)), None):
                return _of_the_drafter(rule, line, phase)
    killed = (end is not None and end.signal == "SIGKILL") or any(_WORKER_KILLED.search(line) for line in lines)
    if killed and oom_kills:
        return Cause(_MEMORY.name, "the kernel has ended a process for lack of memory meanwhile; dmesg tells which", None)
    if errors and _ERROR.match(errors[0]) and (phase == DRAFTER or _DRAFTER.shows.search(errors[0])):
        return Cause(_DRAFTER.name, _DRAFTER.advice, errors[0])
    if killed:
        counted = "" if oom_kills is None else ", and it was not the kernel for lack of memory"
        return Cause("killed from outside", f"somebody sent SIGKILL{counted}", None)
    return None


def _errors(lines: Sequence[str]) -> list[str]:
    """Candidates for the line that says it, the best first: errors from the last to the first, echoes behind them, then the last line."""
    plain = [text for line in reversed(lines) if (text := parse(line, 0.0).text)]
    errors = [text for text in plain if _ERROR.match(text)]
    return [text for text in errors if not _ECHO.search(text)] or errors or plain[:1]


def _of_the_drafter(rule: _Rule, line: str, phase: str) -> Cause:
    if rule is _FILE and phase == DRAFTER:
        return Cause(_DRAFTER.name, f"{rule.name}; {_DRAFTER.advice}", line)
    return Cause(rule.name, rule.advice, line)
