"""Find the engine settings that pay: measure draft steps, top-k and draft tokens, fit what a cycle costs, recommend.

    eyas sweep -c configs/smollm2.yaml            the points of the config's ``sweep`` section, every drafter
    eyas sweep -c CONFIG --simulate               sglang: tok/s against acceptance length, before anything is trained

A point is one drafter at one setting, a handful of held-out prompts, decoded one request at a time. The embedded engine measures all
drafters and the baseline on one server a setting, request by request in turn; SGLang and vLLM take a server a point, with a baseline
server first, last, and after every few points between. Which points come first and which never is eval/exploration.py; what a cycle costs,
eval/cost_model.py.

With ``--simulate`` SGLang is told to accept a given number of tokens a cycle whatever the drafter says (SGLANG_SIMULATE_ACC_LEN; the drafts
of a chain are taken as the text, a tree's text is one token over and over). The text is nonsense, the times are real: where tok/s crosses
the baseline is the acceptance length that a drafter has to reach.

Every finished point is a line of ``sweep/points.jsonl``; the same command goes on behind the last one, and a wider grid measures only what
is new. Lines that were measured from something else (other weights, prompts, flags) stay in the file and are not used. A sweep compares
settings; what the chosen one brings, `eyas bench` measures on more prompts.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import yaml

from eval.bench import WARMUP_TOKENS, bench_prompts, default_drafters, drafter_digest
from eval.clients import BASELINE, AnyClient, connect
from eval.cost_model import Setting
from eval.environment import profile
from eval.exploration import Exploration
from eval.launcher import serving
from eval.measurement import BenchPrompt, Measurement, measurement
from eval.schedule import switches
from eval.sweep_points import Forecast, PairedPoint, Point, append_point, pair, read_points
from eval.sweep_report import write_report
from eval.sweep_result import SweepResult, summarise
from eyas.config import Config, EngineConfig
from eyas.errors import EyasError
from eyas.files import digest_file, digest_json, write_text
from eyas.progress import Task

BASELINE_EVERY = 6
"""Points between two baseline servers, for engines that need a server a point: a machine that drifts is noticed and followed."""

PRETENDED_WITHIN = 0.5
"""Tokens a cycle by which a pretended acceptance length may be missed: it is drawn cycle by cycle, and replies end within cycles."""


def sweep(config: Config, simulate: bool = False) -> SweepResult:
    """Measure what is missing, write ``sweep/{sweep.json, sweep.md, sweep.svg}`` and return what they say.

    Raises EyasError when there are no prompts or drafters, when ``simulate`` is asked of another engine than sglang, or when the baseline
    or the first point cannot be measured; later points that fail (out of memory, say) are named in the result, and tried again next time.
    """
    if simulate and config.engine.kind != "sglang":
        raise EyasError(f"--simulate is for engine.kind sglang, which can pretend an acceptance length; this is {config.engine.kind}")
    run = _Sweep(config)
    run.simulate() if simulate else run.explore()
    result = summarise(config, run.drafters, run.points, run.skipped(), run.failed)
    write_report(run.folder, result)
    return result


def grid(config: Config) -> list[Setting]:
    """The settings that the config asks for and that exist: a chain has steps + 1 tokens, a tree no more than its branches give."""
    chosen = config.sweep
    chains = [Setting(steps, 1, steps + 1) for steps in chosen.steps] if 1 in chosen.topk else []
    wide = [topk for topk in chosen.topk if topk > 1]
    trees = [Setting(*values) for values in itertools.product(chosen.steps, wide, chosen.draft_tokens)]
    settings = sorted({setting for setting in [*chains, *trees] if setting.possible})
    if not settings:
        raise EyasError(f"sweep: no tree of {chosen.steps} steps and top-k {chosen.topk} has {chosen.draft_tokens} tokens to verify")
    return settings


def chosen_drafters(config: Config) -> dict[str, str]:
    """Name -> folder or hub id of the drafters to sweep. Raises EyasError for a name that the run does not have."""
    known = default_drafters(config)
    names = config.sweep.drafters or list(known)
    for name in names:
        if name not in known:
            raise EyasError(f"sweep.drafters: there is no drafter {name!r}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


@dataclass(frozen=True)
class _Job:
    """What one server start measures; ``setting`` is None for a server without speculation."""

    variants: tuple[str, ...]
    setting: Setting | None
    simulated: float | None = None

    def __str__(self) -> str:
        names = ", ".join("baseline" if name == BASELINE else name for name in self.variants)
        pretended = f", acceptance length {self.simulated:g} pretended" if self.simulated else ""
        return f"{names}{f' at {self.setting}' if self.setting else ''}{pretended}"


class _Sweep:
    """One run of the command: the points so far, and what may follow."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, config.folder("sweep")
        self.drafters, self.grid = chosen_drafters(config), grid(config)
        self.prompts = bench_prompts(config.model_copy(update={"eval": config.eval.model_copy(update={"prompts": config.sweep.prompts})}))
        self.made_from = self._digests()
        everything = read_points(self.folder)
        self.starts = max((point.start for point in everything), default=0)
        self.points = [point for point in everything if point.made_from == self.made_from.get(point.variant)]
        self.failed: dict[tuple[str, Setting], str] = {}
        self._since_baseline: int | None = None  # points since this run's last baseline server
        self._spent: list[float] = []  # seconds of this run's points
        if strangers := len(everything) - len(self.points):
            self._say(f"{strangers} lines of {self.folder} were measured from other weights, prompts or settings and are not used")

    def explore(self) -> None:
        """Measure point after point until every other one is hopeless."""
        while job := self._next_job():
            self._attempt(job)
        self._close()

    def simulate(self) -> None:
        """Measure every setting at every pretended length that it can reach, with the first drafter."""
        name = next(iter(self.drafters))
        done = {(point.setting, point.simulated) for point in self.points if point.variant == name}
        lengths = self.config.sweep.simulated_lengths
        reachable = [(setting, length) for setting in self.grid for length in lengths if length <= setting.steps + 1]
        missing = [pair for pair in reachable if pair not in done]
        for number, (setting, length) in enumerate(missing):
            self._attempt(_Job((name,), setting, length), left=len(missing) - number)
        self._close()

    def skipped(self) -> dict[tuple[str, Setting], str]:
        """Points that are neither measured nor failed, and why."""
        found = {}
        for name in self.drafters:
            known = self._known(name)
            for setting in self._pending(name, known):
                reason = self._hopeless(known, setting)
                if reason is not None:
                    found[name, setting] = reason
        return found

    def _known(self, name: str) -> Exploration:
        return Exploration.of([point for point in self._paired() if point.point.variant == name], self._baseline_ms())

    def _paired(self) -> list[PairedPoint]:
        real = [point for point in self.points if point.simulated is None]
        return pair(real, self.config.eval.bootstrap, self.config.seed)

    def _baseline_ms(self) -> float:
        seconds, tokens = (sum(getattr(point, name) for point in self.points if point.setting is None) for name in ("seconds", "tokens"))
        return 1000 * seconds / tokens if tokens else 0.0

    def _pending(self, name: str, known: Exploration) -> list[Setting]:
        measured = {point.setting for point in known.points}
        return [setting for setting in self.grid if setting not in measured and (name, setting) not in self.failed]

    def _hopeless(self, known: Exploration, setting: Setting) -> str | None:
        margin = self.config.sweep.margin
        return None if margin is None else known.hopeless(setting, margin)

    def _wanted(self, name: str) -> list[Setting]:
        known = self._known(name)
        return [setting for setting in self._pending(name, known) if self._hopeless(known, setting) is None]

    def _jobs_left(self) -> set[tuple[str | None, Setting]]:
        """Server starts that may still be needed: the embedded engine holds all drafters in one."""
        one = switches(self.config)
        return {(None if one else name, setting) for name in self.drafters for setting in self._wanted(name)}

    def _next_job(self) -> _Job | None:
        wanted = {name: self._wanted(name) for name in self.drafters}
        name = next((name for name in wanted if wanted[name]), None)
        if name is None:
            return None
        setting = self._known(name).next(wanted[name])
        if switches(self.config):
            return _Job((BASELINE, *(other for other in wanted if setting in wanted[other])), setting)
        return _Job((name,), setting)

    def _attempt(self, job: _Job, left: int | None = None) -> None:
        """Measure a job, with a baseline server before it when one is due; a failure is noted and the sweep goes on."""
        if not switches(self.config) and (self._since_baseline is None or self._since_baseline >= BASELINE_EVERY):
            self._measure(_Job((BASELINE,), None))
            self._since_baseline = 0
        left = left or len(self._jobs_left())
        rest = f", ETA {timedelta(seconds=round(sum(self._spent) / len(self._spent) * left))}" if self._spent else ""
        self._say(f"{job}; at most {left} server start{'s' if left > 1 else ''} to go{rest}")
        try:
            self._measure(job)
        except EyasError as error:
            proven = any(point.setting is not None for point in self.points)
            if job.setting is None or switches(self.config) or not proven:
                raise  # not this setting but the whole arrangement is at fault
            self._say(f"{job} failed: {error}")
            self.failed |= {(name, job.setting): str(error) for name in job.variants}
        else:
            self._since_baseline = (self._since_baseline or 0) + 1

    def _close(self) -> None:
        """The last baseline server, where points were measured since the one before."""
        if not switches(self.config) and self._since_baseline:
            self._measure(_Job((BASELINE,), None))

    def _measure(self, job: _Job) -> None:
        """Start a server, measure, append the points."""
        self.starts += 1
        begin, config = time.monotonic(), self._config(job)
        forecasts = {name: self._forecast(name, job) for name in job.variants}
        with serving(config, self.drafters, None if switches(config) else job.variants[0]) as url, connect(url) as client:
            client.ready()
            samples = self._requests(client, job)
        wall_s = time.monotonic() - begin
        if job.setting is not None:
            self._spent.append(wall_s)
        for name, measured in samples.items():
            setting = None if name == BASELINE else job.setting
            point = Point(name, setting, job.simulated, self.starts, self.made_from[name], wall_s, forecasts[name], measured)
            append_point(self.folder, point)
            self.points.append(point)
        self._tell(job)

    def _forecast(self, name: str, job: _Job) -> Forecast | None:
        if name == BASELINE or job.setting is None or job.simulated:
            return None
        return self._known(name).forecast(job.setting)

    def _config(self, job: _Job) -> Config:
        """The run's config with the engine settings of a job."""
        if job.setting is None:
            return self.config
        setting = job.setting
        changed: dict[str, object] = {"draft_steps": setting.steps, "topk": setting.topk, "draft_tokens": setting.tokens}
        if job.simulated:
            changed["environment"] = self._environment(job.simulated, setting)
        return self.config.model_copy(update={"engine": EngineConfig.model_validate(self.config.engine.model_dump() | changed)})

    def _environment(self, length: float, setting: Setting) -> Path:
        """The server's environment file with what makes SGLang pretend."""
        values = profile(self.config.engine.environment) | {
            "SGLANG_SIMULATE_ACC_LEN": f"{length:g}",
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token" if setting.chain else "fixed",
        }
        path = self.folder / f"simulate-{length:g}{'' if setting.chain else '-tree'}.yaml"
        write_text(path, yaml.safe_dump(values))
        return path

    def _requests(self, client: AnyClient, job: _Job) -> dict[str, list[Measurement]]:
        """Every prompt under every variant, in an order rotated from prompt to prompt."""
        found: dict[str, list[Measurement]] = {name: [] for name in job.variants}
        for name in job.variants:  # not counted: the first request of a server pays for what later ones find ready
            self._ask(client, self.prompts[0], name, 0, WARMUP_TOKENS)
        with Task(str(job), total=len(self.prompts) * len(job.variants), unit="requests") as task:
            for number, prompt in enumerate(self.prompts):
                turn = number % len(job.variants)
                for order, name in enumerate(job.variants[turn:] + job.variants[:turn]):
                    client.flush_cache()
                    found[name].append(self._ask(client, prompt, name, order, self.config.sweep.max_new_tokens))
                    task.advance()
        for name, samples in found.items():
            _require_sense(name, samples, job)
        return found

    def _ask(self, client: AnyClient, prompt: BenchPrompt, name: str, order: int, tokens: int) -> Measurement:
        limit, seed = min(tokens, self.config.sweep.max_new_tokens), int(digest_json([self.config.seed, prompt.key])[:7], 16)
        reply = client.generate(prompt.prompt_ids, limit, self.config.eval.temperature, seed, name if switches(self.config) else None)
        return replace(measurement(prompt, name, order, reply), output_ids=[])  # nobody reads them from a sweep

    def _digests(self) -> dict[str, str]:
        """By variant, what decides the numbers: everything but the settings that are swept."""
        swept, where = {"draft_steps", "topk", "draft_tokens"}, {"host", "port", "stuck_limit_s"}
        common = {
            "target": self.config.target.model_dump(mode="json"),
            "engine": self.config.engine.model_dump(mode="json", exclude=swept | where),
            "environment": digest_file(self.config.engine.environment) if self.config.engine.environment else None,
            "requests": [self.config.eval.temperature, self.config.sweep.max_new_tokens, self.config.seed],
            "prompts": [[prompt.key, prompt.prompt_ids] for prompt in self.prompts],
        }
        drafters = {name: digest_json([common, drafter_digest(path)]) for name, path in self.drafters.items()}
        return {BASELINE: digest_json(common), **drafters}

    def _tell(self, job: _Job) -> None:
        """What the points of a server start brought."""
        for point in pair(self.points, self.config.eval.bootstrap, self.config.seed):
            if point.point.start == self.starts:
                foretold = f" (foretold {point.point.forecast.speedup:.2f})" if point.point.forecast else ""
                self._say(
                    f"{point.point.variant} at {point.setting}: {point.tokens_per_second().value or 0:.1f} tok/s, "
                    f"{point.gain:.2f} x baseline{foretold}, acceptance length {point.length().value or 0:.2f}"
                )

    @staticmethod
    def _say(text: str) -> None:
        print(f"sweep: {text}", file=sys.stderr)


def _require_sense(name: str, samples: Sequence[Measurement], job: _Job) -> None:
    """Raise EyasError for a baseline that speculates, a drafter that is not used, a length not pretended, and replies too short to time."""
    cycles = sum(sample.verify_ct or 0 for sample in samples)
    if name == BASELINE and cycles:
        raise EyasError("sweep: the server speculates on baseline requests")
    if sum(sample.decode_tokens for sample in samples) == 0:
        raise EyasError(f"sweep: {job}: every reply ended with its first piece, so there is no decoding to time; choose other prompts")
    if name != BASELINE and not cycles:
        raise EyasError(f"sweep: {job}: the server counts no verify steps: speculation is off, or this engine does not report it")
    length = sum(sample.emitted for sample in samples) / cycles if cycles else 0.0
    if job.simulated and abs(length - job.simulated) > PRETENDED_WITHIN:
        raise EyasError(f"sweep: {job}: the server accepted {length:.2f} tokens a cycle: this engine does not pretend")
