"""Measure a server: held-out chat prompts, every drafter and no drafter on the same prompts.

    eyas bench --config configs/smollm2.yaml              the configured engine, started for this
    eyas bench --config ... --url http://HOST:PORT        a server that somebody else started

The schedule (eval/schedule.py): an engine that switches speculation per request measures all variants of a prompt one after the other; any
other is started anew for each leg, the baseline before and after the drafters. The drafters' server is tried first, once: that a drafter
does not load is known before the baseline has been measured, and the baseline is then given the limits that this server resolved
(eval/arguments.py). ``eval.concurrency`` repeats every leg with that many requests in flight.

The prefix cache is flushed before every request (before every level, where more than one is in flight). Warm-up requests are not counted.
Every measurement is appended to ``bench/measurements.jsonl`` as it comes; a killed run resumes behind the last. What the machine did
meanwhile is in ``bench/conditions.jsonl``. A server of somebody else with one fixed behaviour is measured once with and once without
speculation, into the same folder; the baseline once more after that gives the drift. Measurements of other drafters, prompts or settings
are never mixed in: their folder is kept as ``bench.1``, ``bench.2`` ...
"""

import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.arguments import equalising_flags, public_info
from eval.clients import BASELINE, Client, VllmClient, connect
from eval.conditions import Recorder, machine_of_client
from eval.measurement import LOOP_RULE, MEASUREMENTS, BenchPrompt, Measurement, measurement, places_done
from eval.schedule import Ask, Leg, leg_of_server, legs, missing, switches
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import JsonlAppender, digest_file, digest_json, read_jsonl
from eyas.manifest import NAME, begin, finish, read_manifest, write_manifest
from eyas.progress import Task

STARTER, RESULT = "starter", "result"
"""Names of the warm start and of this run's export among the drafters; any other name is a drafter compared beside them."""

WARMUP_TOKENS = 32
AnyClient = Client | VllmClient


def default_drafters(config: Config) -> dict[str, str]:
    """The drafters of a run: its warm start, its export if there is one, and ``eval.compare`` under their folder names.

    Raises EyasError when two have the same name, or when there is none.
    """
    drafters = servable_drafters(config, BASELINE)
    if not drafters:
        export = config.folder("export")
        raise EyasError(f"there is no drafter: {export} does not exist (run `eyas export`), drafter.init is scratch, eval.compare is empty")
    return drafters


def servable_drafters(config: Config, variant: str) -> dict[str, str]:
    """The drafters of a run, with the export that is not yet there when ``variant`` asks for it; perhaps none.

    Raises EyasError when two have the same name.
    """
    drafters = {} if config.drafter.init == "scratch" else {STARTER: config.drafter.init}
    export = config.folder("export")
    if export.exists() or variant == RESULT:
        drafters[RESULT] = str(export)
    for path in config.eval.compare:
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if name in {*drafters, RESULT, BASELINE}:
            raise EyasError(f"eval.compare: two drafters are called {name!r}; rename one of the folders")
        drafters[name] = path
    return drafters


def bench(config: Config, url: str | None, drafters: dict[str, str]) -> Path:
    """Measure every held-out prompt under every variant and return the bench folder.

    Without ``url`` the configured engine is started with ``drafters`` (name -> folder or hub id). With it, that server is measured as it
    is; ``drafters`` then only gives its draft model a name. Raises EyasError when prompts are missing or the server dies or answers an
    error; what was measured until then is kept.
    """
    run = _Bench(config, drafters)
    run.begin()
    if url is not None:
        run.measure_server(url)
    else:
        run.measure_engine()
    run.finish()
    return run.folder


def bench_prompts(config: Config) -> list[BenchPrompt]:
    """``eval.prompts`` held-out prompts, spread evenly over categories, always the same ones."""
    path = _heldout_file(config)
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


def _heldout_file(config: Config) -> Path:
    """Held-out prompts as `eyas prep` answered them, else as `eyas prep --heldout` left them."""
    answered, alone = config.folder("replies") / "greedy.jsonl", config.folder("prompts") / "heldout.jsonl"
    found = next((path for path in (answered, alone) if path.exists()), None)
    if found is None:
        raise EyasError(
            f"{answered} does not exist: it holds the held-out prompts, run `eyas prep` first "
            "(or `eyas prep --heldout`, which is enough to measure drafters that exist already)"
        )
    return found


def _prompt(row: dict[str, Any], where: str) -> BenchPrompt:
    try:
        return BenchPrompt(row["key"], row["category"], list(row["messages"]), list(row["prompt_ids"]), row.get("template", {}))
    except (KeyError, TypeError) as error:
        raise EyasError(f"{where}: not a row of `eyas prep` ({error!r})") from None


class _Bench:
    """One run of the stage: what is measured, where it is written, and what the manifest shall hold."""

    def __init__(self, config: Config, drafters: dict[str, str]) -> None:
        self.config, self.drafters = config, drafters
        self.folder, self.prompts = config.folder("bench"), bench_prompts(config)
        self.held: dict[str, Any] = {}

    def begin(self) -> None:
        """Set aside what was measured from other things, take over what was recorded before."""
        part, inputs = _config_part(self.config), _inputs(self.config, self.prompts, self.drafters)
        _set_aside_outdated(self.folder, part, inputs)
        if (self.folder / NAME).exists():
            self.held = read_manifest(self.folder, "bench").holds
        begin(self.folder, "bench", part, inputs)
        self._record()

    def finish(self) -> None:
        """Everything that was asked for is there."""
        finish(self.folder, self.held | {"prompts": len(self.prompts), "machine": machine_of_client(), "loop_rule": LOOP_RULE})

    def measure_server(self, url: str) -> None:
        """Measure a running server as it is: the leg that it can serve."""
        with connect(url) as client:
            client.ready()
            info = client.server_info()
        self.held["foreign"] = True
        self._measure(url, leg_of_server(info, self.drafters, places_done(self.folder)), self.config)

    def measure_engine(self) -> None:
        """Start the configured engine for every leg that lacks measurements."""
        from eval.launcher import serving

        done = places_done(self.folder)
        for leg in legs(self.config, self.drafters):
            if not self._missing(leg, done):
                continue
            config = self._equalised(leg)
            with serving(config, self.drafters, leg.serve) as address:
                self._measure(address, leg, config)

    def _equalised(self, leg: Leg) -> Config:
        """The config that a leg is served with: the baseline gets the limits that a speculating server resolved."""
        if switches(self.config) or leg.serve != BASELINE:
            return self.config
        if "equalised" not in self.held:
            self.held["equalised"] = self._try_speculation()
            self._record()
        flags = {**self.config.engine.flags, **self.held["equalised"]}
        return self.config.model_copy(update={"engine": self.config.engine.model_copy(update={"flags": flags})})

    def _try_speculation(self) -> dict[str, Any]:
        """Start the first drafter's server, see that it speculates, and return the flags by which a baseline has the same limits."""
        from eval.launcher import serving

        name = next(iter(self.drafters))
        print(f"bench: trying the server with drafter {name!r} before the baseline is measured", file=sys.stderr)
        with serving(self.config, self.drafters, name) as address, connect(address) as client:
            client.ready()
            leg = Leg("trial", {name: None}, name)
            _require_as_asked(self._ask(client, Ask(self.prompts[0], name, 0), leg, 1, WARMUP_TOKENS), address)
            return equalising_flags(self.config.engine.kind, client.server_info(), self.config.engine.flags)

    def _levels(self, leg: Leg) -> list[int]:
        return [1] if len(leg.variants) > 1 else self.config.eval.concurrency

    def _missing(self, leg: Leg, done: set[tuple[str, str, str, int]]) -> dict[int, list[Ask]]:
        """Level of concurrency -> what is still to be asked; levels with nothing left are not there."""
        todo = {level: missing(leg, self.prompts, level, done) for level in self._levels(leg)}
        return {level: asks for level, asks in todo.items() if asks}

    def _measure(self, url: str, leg: Leg, config: Config) -> None:
        """Make the missing requests of a leg."""
        todo = self._missing(leg, places_done(self.folder))
        with ExitStack() as stack:
            clients = [connect(url) for _ in range(max(todo, default=1))]
            for client in clients:
                stack.callback(client.close)
            clients[0].ready()
            info = clients[0].server_info()
            self._note_server(leg, info)
            if not todo:
                return
            self._warm_up(clients[0], leg)
            stack.enter_context(Recorder(self.folder, config, leg.name, list(leg.variants), info))
            file = stack.enter_context(JsonlAppender(self.folder / MEASUREMENTS))
            total = sum(len(asks) for asks in todo.values())
            task = stack.enter_context(Task(f"bench, {_title(leg)}", total=total, unit="requests"))
            for level, asks in todo.items():
                for measured in self._level(clients[:level], leg, asks):
                    _require_as_asked(measured, url)
                    file.append(asdict(measured))
                    task.advance(note=_note(measured))

    def _level(self, clients: Sequence[AnyClient], leg: Leg, asks: Sequence[Ask]) -> Iterator[Measurement]:
        """All requests of one level, as many in flight as there are clients; in the order in which they end."""
        tokens = self.config.eval.max_new_tokens
        if len(clients) == 1:
            for ask in asks:
                clients[0].flush_cache()
                yield self._ask(clients[0], ask, leg, 1, tokens)
            return
        with ThreadPoolExecutor(len(clients), thread_name_prefix="request") as threads:
            free = list(clients)
            # Kernels are chosen per batch size: without this the first requests of a level would pay for it.
            list(threads.map(lambda client: self._ask(client, asks[0], leg, len(clients), WARMUP_TOKENS), clients))
            clients[0].flush_cache()
            waiting, flying = iter(asks), dict[Future[Measurement], AnyClient]()
            try:
                while True:
                    for ask in itertools.islice(waiting, len(free)):
                        client = free.pop()
                        flying[threads.submit(self._ask, client, ask, leg, len(clients), tokens)] = client
                    if not flying:
                        return
                    for landed in wait(flying, return_when=FIRST_COMPLETED).done:
                        free.append(flying.pop(landed))
                        yield landed.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, client: AnyClient, ask: Ask, leg: Leg, concurrency: int, tokens: int) -> Measurement:
        sent_at = time.time()
        limit = min(tokens, self.config.eval.max_new_tokens)
        seed = _seed(self.config, ask.prompt)
        reply = client.generate(ask.prompt.prompt_ids, limit, self.config.eval.temperature, seed, leg.variants[ask.variant])
        return measurement(ask.prompt, ask.variant, ask.order, reply, leg.name, concurrency, sent_at)

    def _warm_up(self, client: AnyClient, leg: Leg) -> None:
        """Uncounted requests, each variant; the first prompt also as a chat, which tells whether the server's chat template is ours."""
        count = self.config.eval.warmup_prompts
        for prompt in self.prompts[-count:] if count else []:
            for variant in leg.variants:
                self._ask(client, Ask(prompt, variant, 0), leg, 1, WARMUP_TOKENS)
        first = self.prompts[0]
        if not first.template:  # chats are asked with the server's defaults
            chat = client.chat(first.messages, 2, 0.0, next(iter(leg.variants.values())))
            self.held["template"] = {"prompt_tokens": len(first.prompt_ids), "server_prompt_tokens": chat.prompt_tokens}
            self._record()

    def _note_server(self, leg: Leg, info: dict[str, Any]) -> None:
        servers = self.held.get("servers", {})
        self.held["servers"] = servers | {name: public_info(info) for name in leg.variants}
        self._record()

    def _record(self) -> None:
        """Write what the manifest holds so far: a killed run has to find it again."""
        write_manifest(self.folder, read_manifest(self.folder, "bench").model_copy(update={"holds": self.held}))


def _title(leg: Leg) -> str:
    names = ", ".join(leg.variants)
    return names if len(leg.variants) > 1 else f"{names} ({leg.name})"


def _require_as_asked(measured: Measurement, url: str) -> None:
    """A baseline that speculates, or a drafter that is not used, would be measured without anybody noticing."""
    if measured.variant == BASELINE and measured.verify_ct:
        raise EyasError(f"{url} speculates on the baseline request: measure the baseline on a server without speculation")
    if measured.variant != BASELINE and not measured.verify_ct and measured.completion_tokens > 1:
        raise EyasError(
            f"{url} counts no verify steps (meta_info.spec_verify_ct) for drafter {measured.variant!r}: "
            "speculation is off, or this engine does not report it"
        )


def _seed(config: Config, prompt: BenchPrompt) -> int:
    """One seed a prompt, the same for every variant; 31 bits, as engines take it."""
    return int(digest_json([config.seed, prompt.key])[:8], 16) & 0x7FFFFFFF


def _note(measured: Measurement) -> str:
    rate = measured.completion_tokens / measured.total_s if measured.total_s > 0 else 0.0
    length = f", {measured.emitted / measured.verify_ct:.2f} tokens a verify step" if measured.verify_ct else ""
    flying = f" x {measured.concurrency}" if measured.concurrency > 1 else ""
    return f"{measured.variant}: {rate:.1f}{flying} tok/s{length}"


def _set_aside_outdated(folder: Path, part: dict[str, Any], inputs: dict[str, str]) -> None:
    """Rename a folder that was measured from other things, and say so: a new training run is measured anew, the old numbers stay."""
    if not (folder / NAME).exists():
        return
    there = read_manifest(folder, "bench")
    changed = [*_changed(there.config, part), *_changed(there.inputs, inputs)]
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


def _config_part(config: Config) -> dict[str, Any]:
    """What decides a measurement: not the bootstrap, nor where the server listens, nor which levels of concurrency are asked for."""
    return {
        "target": config.target.model_dump(mode="json"),
        "engine": config.engine.model_dump(mode="json", exclude={"host", "port", "stuck_limit_s"}),
        "eval": config.eval.model_dump(mode="json", exclude={"bootstrap", "compare", "concurrency"}),
        "seed": config.seed,
    }


def _inputs(config: Config, prompts: Sequence[BenchPrompt], drafters: dict[str, str]) -> dict[str, str]:
    inputs = {"prompts": digest_json([[prompt.key, prompt.prompt_ids] for prompt in prompts])}
    for name, path in drafters.items():
        inputs[f"drafter.{name}"] = drafter_digest(path)
    if config.engine.environment is not None:
        inputs["environment"] = digest_file(config.engine.environment)
    return inputs


def drafter_digest(path: str) -> str:
    """Digest of a folder's config and weights; a hub id stands for itself."""
    folder = Path(path)
    if not folder.is_dir():
        return digest_json(path)
    files = sorted(file for file in folder.iterdir() if file.name == "config.json" or file.suffix == ".safetensors")
    return digest_json([[file.name, digest_file(file)] for file in files])
