"""Measure a server: held-out chat prompts, every drafter and no drafter on the same prompts, one request at a time.

    eyas bench --config configs/smollm2.yaml              the embedded server, started for this
    eyas bench --config ... --url http://HOST:PORT        a server that somebody else started

For each prompt all variants run one after the other (interleaved pairs: a machine that slows down slows all of them), in an order
rotated from prompt to prompt. The prefix cache is flushed before every request, since the variant before has just computed this very
prompt. Warm-up requests are not counted. Every measurement is appended to ``bench/measurements.jsonl`` as it comes; a killed run
resumes behind the last. A server with one fixed behaviour (SGLang) is measured twice, with and without speculation, into the same folder.
Measurements of other drafters, prompts or settings are never mixed in: their folder is kept as ``bench.1``, ``bench.2`` ...
"""

import itertools
import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval.clients import BASELINE, Client, Counts, Reply
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import JsonlAppender, digest_file, digest_json, read_jsonl
from eyas.manifest import NAME, begin, finish, read_manifest, write_manifest
from eyas.progress import Task

STARTER, RESULT = "starter", "result"
"""Names of the warm start and of this run's export among the drafters; any other name is a drafter compared beside them."""

MEASUREMENTS = "measurements.jsonl"
WARMUP_TOKENS = 32
LOOP_GRAM, LOOP_TIMES = 8, 3
LOOP_RULE = f"some {LOOP_GRAM} consecutive tokens of the reply occur at least {LOOP_TIMES} times in it"


@dataclass(frozen=True)
class BenchPrompt:
    """A held-out prompt as it is sent: exactly these tokens."""

    key: str
    category: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]


@dataclass(frozen=True)
class Measurement:
    """One request: one prompt under one variant. Seconds are the client's, from sending."""

    key: str
    category: str
    variant: str
    order: int
    """Place of the variant in this prompt's rotation, from 0."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: str
    first_token_s: float
    first_tokens: int
    total_s: float
    verify_ct: int | None
    """Verify steps; None without speculation."""
    correct: int | None
    proposed: int | None
    histogram: list[int]
    """Index: accepted drafts in a cycle; value: cycles."""
    engine_length: float | None
    """Acceptance length under the engine's own name and rule."""
    looping: bool
    output_ids: list[int]
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.total_s - self.first_token_s

    @property
    def decode_tokens(self) -> int:
        """Tokens that came in ``decode_s``."""
        return self.completion_tokens - self.first_tokens

    @property
    def emitted(self) -> int:
        """Tokens that verify steps emitted: all but the first, which comes from the prefill."""
        return self.completion_tokens - 1


def default_drafters(config: Config) -> dict[str, str]:
    """The drafters of a run: its warm start, its export, and ``eval.compare`` under their folder names."""
    drafters = {} if config.drafter.init == "scratch" else {STARTER: config.drafter.init}
    drafters[RESULT] = str(config.folder("export"))
    for path in config.eval.compare:
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if name in {*drafters, BASELINE}:
            raise EyasError(f"eval.compare: two drafters are called {name!r}; rename one of the folders")
        drafters[name] = path
    return drafters


def bench(config: Config, url: str | None, drafters: dict[str, str]) -> Path:
    """Measure every held-out prompt under every variant and return the bench folder.

    Without ``url`` the embedded server is started with ``drafters`` (name -> folder or hub id). With it, that server is measured as it is;
    ``drafters`` then only gives its draft model a name. Raises EyasError when prompts are missing or the server dies or answers an error;
    what was measured until then is kept.
    """
    folder, prompts = config.folder("bench"), bench_prompts(config)
    part, inputs = _config_part(config), _inputs(config, drafters)
    _set_aside_outdated(folder, part, inputs)
    held = _held_before(folder)
    begin(folder, "bench", part, inputs)
    write_manifest(folder, read_manifest(folder, "bench").model_copy(update={"holds": held}))
    if url is not None:
        held = _measure(config, url, prompts, None, drafters, folder, held)
    elif _missing(folder, prompts, [BASELINE, *drafters]):
        from eval.launcher import serving

        variants: dict[str, str | None] = {name: name for name in (BASELINE, *drafters)}
        with serving(config, drafters) as address:
            held = _measure(config, address, prompts, variants, drafters, folder, held)
    finish(folder, held | {"prompts": len(prompts), "machine": machine(), "loop_rule": LOOP_RULE})
    return folder


def bench_prompts(config: Config) -> list[BenchPrompt]:
    """``eval.prompts`` held-out prompts of the replies folder, spread evenly over categories, always the same ones."""
    path = config.folder("replies") / "greedy.jsonl"
    if not path.exists():
        raise EyasError(f"{path} does not exist: it holds the held-out prompts, run `eyas prep` first")
    by_category: dict[str, list[BenchPrompt]] = defaultdict(list)
    for line, row in read_jsonl(path):
        prompt = _prompt(row, f"{path}, line {line}")
        by_category[prompt.category].append(prompt)
    if not by_category:
        raise EyasError(f"{path} is empty: no held-out prompts to measure, run `eyas prep` again")
    for prompts in by_category.values():
        prompts.sort(key=lambda prompt: digest_json([config.seed, prompt.key]))
    longest = max(len(prompts) for prompts in by_category.values())
    rounds = [by_category[name][place] for place in range(longest) for name in sorted(by_category) if place < len(by_category[name])]
    return rounds[: config.eval.prompts]


def _prompt(row: dict[str, Any], where: str) -> BenchPrompt:
    try:
        return BenchPrompt(row["key"], row["category"], list(row["messages"]), list(row["prompt_ids"]))
    except (KeyError, TypeError) as error:
        raise EyasError(f"{where}: not a row of `eyas prep` ({error!r})") from None


def read_measurements(folder: Path) -> list[Measurement]:
    """All measurements of a bench folder. Raises EyasError naming file and line for a broken one."""
    path = Path(folder) / MEASUREMENTS
    found = []
    for line, row in read_jsonl(path):
        try:
            found.append(Measurement(**row))
        except TypeError as error:
            raise EyasError(f"{path}, line {line}: not a measurement of this version ({error})") from None
    return found


def _measure(
    config: Config,
    url: str,
    prompts: list[BenchPrompt],
    variants: dict[str, str | None] | None,
    drafters: dict[str, str],
    folder: Path,
    held: dict[str, Any],
) -> dict[str, Any]:
    """Send what is missing and append it; returns what the manifest shall hold about the servers."""
    with Client(url) as client:
        client.ready()
        info = client.server_info()
        variants = variants or server_variants(info, drafters)
        todo = list(_requests(prompts, list(variants), _done(folder)))
        held = held | {"servers": held.get("servers", {}) | {name: public_info(info) for name in variants}}
        if not todo:
            return held
        held["template"] = _warm_up(config, client, prompts, variants)
        with JsonlAppender(folder / MEASUREMENTS) as file, Task("bench", total=len(todo), unit="requests") as task:
            for prompt, variant, order in todo:
                client.flush_cache()
                reply = client.generate(
                    prompt.prompt_ids, config.eval.max_new_tokens, config.eval.temperature, _seed(config, prompt), variants[variant]
                )
                measured = measurement(prompt, variant, order, reply)
                _require_as_asked(measured, url)
                file.append(asdict(measured))
                task.advance(note=_note(measured))
    return held


def measurement(prompt: BenchPrompt, variant: str, order: int, reply: Reply) -> Measurement:
    """A reply as a row of measurements.jsonl."""
    counts = reply.counts or Counts(0, 0, None, (), None)
    return Measurement(
        key=prompt.key,
        category=prompt.category,
        variant=variant,
        order=order,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        finish_reason=reply.finish_reason,
        first_token_s=reply.first_token_s,
        first_tokens=reply.first_tokens,
        total_s=reply.total_s,
        verify_ct=counts.verify_ct if reply.counts or variant != BASELINE else None,
        correct=counts.correct if reply.counts else None,
        proposed=counts.proposed,
        histogram=list(counts.histogram),
        engine_length=counts.engine_length,
        looping=loops(reply.output_ids),
        output_ids=list(reply.output_ids),
        parts=reply.parts,
    )


def _require_as_asked(measured: Measurement, url: str) -> None:
    """A baseline that speculates, or a drafter that is not used, would be measured without anybody noticing."""
    if measured.variant == BASELINE and measured.verify_ct:
        raise EyasError(f"{url} speculates on the baseline request: measure the baseline on a server without speculation")
    if measured.variant != BASELINE and not measured.verify_ct and measured.completion_tokens > 1:
        raise EyasError(
            f"{url} counts no verify steps (meta_info.spec_verify_ct) for drafter {measured.variant!r}: "
            "speculation is off, or this engine does not report it"
        )


def loops(ids: Sequence[int]) -> bool:
    """True for a reply that repeats itself (LOOP_RULE): such text is trivially accepted and says nothing about a drafter."""
    grams = Counter(tuple(ids[start : start + LOOP_GRAM]) for start in range(len(ids) - LOOP_GRAM + 1))
    return any(count >= LOOP_TIMES for count in grams.values())


def first_difference(ids: Sequence[int], baseline_ids: Sequence[int]) -> int | None:
    """Index of the first token at which two replies differ (a shorter one differs at its end); None when they are equal."""
    for index, (one, other) in enumerate(zip(ids, baseline_ids, strict=False)):
        if one != other:
            return index
    return None if len(ids) == len(baseline_ids) else min(len(ids), len(baseline_ids))


def server_variants(info: dict[str, Any], drafters: dict[str, str]) -> dict[str, str | None]:
    """What a running server can be asked for: variant name -> value of the request field, None for a server with one behaviour.

    The embedded server switches per request between its drafters. SGLang does what it was started with: "none" without speculation, else
    the name that ``drafters`` gives to its draft model, or that folder's own name.
    """
    embedded = info.get("eyas")
    if isinstance(embedded, dict):
        return {name: name for name in (BASELINE, *embedded.get("drafters", []))}
    if not info.get("speculative_algorithm"):
        return {BASELINE: None}
    path = str(info.get("speculative_draft_model_path") or "drafter").rstrip("/")
    named = next((name for name, folder in drafters.items() if _same_drafter(folder, path)), None)
    return {named or path.rsplit("/", 1)[-1]: None}


def _same_drafter(one: str, other: str) -> bool:
    plain = [name.removeprefix("hub:").partition("@")[0].rstrip("/") for name in (one, other)]
    return plain[0] == plain[1] or Path(plain[0]).resolve() == Path(plain[1]).resolve()


def public_info(info: dict[str, Any]) -> dict[str, Any]:
    """The plain values of /server_info that may be shown: no keys or passwords, no running counters."""
    hidden = ("key", "password", "secret", "token_", "internal_states", "avg_")
    plain = {name: value for name, value in info.items() if isinstance(value, str | int | float | bool | list | dict | None)}
    return {name: value for name, value in plain.items() if not any(word in name.lower() for word in hidden)}


def machine() -> dict[str, Any]:
    """The machine of the client (and of the embedded server): what the times depend on."""
    return {
        "processor": _processor(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _warm_up(config: Config, client: Client, prompts: list[BenchPrompt], variants: dict[str, str | None]) -> dict[str, Any]:
    """Uncounted requests, each variant; the first prompt also as a chat, which tells whether the server's chat template is ours."""
    warm = prompts[-config.eval.warmup_prompts :] if config.eval.warmup_prompts else []
    for prompt in warm:
        for value in variants.values():
            client.generate(prompt.prompt_ids, min(WARMUP_TOKENS, config.eval.max_new_tokens), config.eval.temperature, config.seed, value)
    first = prompts[0]
    chat = client.chat(first.messages, 2, 0.0, next(iter(variants.values())))
    return {"prompt_tokens": len(first.prompt_ids), "server_prompt_tokens": chat.prompt_tokens}


def _requests(prompts: list[BenchPrompt], variants: list[str], done: set[tuple[str, str]]) -> Iterator[tuple[BenchPrompt, str, int]]:
    for number, prompt in enumerate(prompts):
        turn = number % len(variants)
        for order, variant in enumerate(variants[turn:] + variants[:turn]):
            if (prompt.key, variant) not in done:
                yield prompt, variant, order


def _done(folder: Path) -> set[tuple[str, str]]:
    path = folder / MEASUREMENTS
    if not path.exists():
        return set()
    with JsonlAppender(path):  # a killed run may have left a torn last line: opening for appending cuts it off
        pass
    return {(measured.key, measured.variant) for measured in read_measurements(folder)}


def _missing(folder: Path, prompts: list[BenchPrompt], variants: list[str]) -> bool:
    return next(_requests(prompts, variants, _done(folder)), None) is not None


def _seed(config: Config, prompt: BenchPrompt) -> int:
    """One seed a prompt, the same for every variant; 31 bits, as engines take it."""
    return int(digest_json([config.seed, prompt.key])[:8], 16) & 0x7FFFFFFF


def _note(measured: Measurement) -> str:
    rate = measured.completion_tokens / measured.total_s if measured.total_s > 0 else 0.0
    length = f", {measured.emitted / measured.verify_ct:.2f} tokens a verify step" if measured.verify_ct else ""
    return f"{measured.variant}: {rate:.1f} tok/s{length}"


def _set_aside_outdated(folder: Path, part: dict[str, Any], inputs: dict[str, str]) -> None:
    """Rename a folder that was measured from other things, and say so: a new training run is measured anew, the old numbers stay."""
    if not (folder / NAME).exists():
        return
    there = read_manifest(folder, "bench")
    changed = [*_changed(there.inputs, inputs), *_changed(there.config, part)]
    if not changed:
        return
    free = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    kept = next(path for path in free if not path.exists())
    try:
        folder.rename(kept)
    except OSError as error:
        raise EyasError(f"{folder} was measured with other {', '.join(changed)} and cannot be moved: {error.strerror or error}") from error
    print(f"bench: {', '.join(changed)} changed, so all is measured anew; earlier measurements are kept in {kept}", file=sys.stderr)


def _changed(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of the values in which two nested dicts differ."""
    for name in {**there, **here}:
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changed(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}"


def _held_before(folder: Path) -> dict[str, Any]:
    """What earlier runs recorded (other servers measured into the same folder)."""
    return read_manifest(folder, "bench").holds if (folder / NAME).exists() else {}


def _config_part(config: Config) -> dict[str, Any]:
    """What decides a measurement: not the bootstrap, nor where the server listens."""
    return {
        "target": config.target.model_dump(mode="json"),
        "engine": config.engine.model_dump(mode="json", exclude={"host", "port"}),
        "eval": config.eval.model_dump(mode="json", exclude={"bootstrap", "compare"}),
        "seed": config.seed,
    }


def _inputs(config: Config, drafters: dict[str, str]) -> dict[str, str]:
    inputs = {"replies": digest_file(config.folder("replies") / "greedy.jsonl")}
    for name, path in drafters.items():
        inputs[f"drafter.{name}"] = _drafter_digest(path)
    return inputs


def _drafter_digest(path: str) -> str:
    """Digest of a folder's config and weights; a hub id stands for itself."""
    folder = Path(path)
    if not folder.is_dir():
        return digest_json(path)
    files = sorted(file for file in folder.iterdir() if file.name == "config.json" or file.suffix == ".safetensors")
    return digest_json([[file.name, digest_file(file)] for file in files])
