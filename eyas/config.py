"""The one typed schema of a run. A YAML file fills it, ``--set a.b=c`` overrides it, an unknown key is an error.

Paths are relative to where the command runs. A run's stages write below ``output``:
``replies/ states/{train,greedy,sampled}/ train/ export/ bench/ report/``.
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eyas.errors import EyasError


class Section(BaseModel):
    """Base of all sections: unknown keys and infinite numbers are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, values: Any) -> Any:
        return {} if values is None else values  # YAML's 'train:' with every line below it commented out


class TargetConfig(Section):
    """The model whose decoding is to be sped up."""

    model: str = Field(description="HF folder, hub id, or 'package:smollm2' (SmolLM2-135M-Instruct from PyPI)")
    revision: str | None = Field(None, description="hub revision; None takes the default branch and records its commit")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = Field("auto", description="'auto' (cuda if there is one), 'cpu', 'cuda:0' ...")
    trust_remote_code: bool = Field(False, description="run Python code that the model's repository ships")
    tokenizer: Literal["auto", "transformers", "tiktoken"] = Field(
        "auto", description="tiktoken: Kimi's published vocabulary, read without its code; auto: that for Kimi models that ship one"
    )
    template: dict[str, Any] = Field(default_factory=dict, description="arguments of the chat template, e.g. {thinking: false}")

    @model_validator(mode="after")
    def _check(self) -> "TargetConfig":
        reserved = {"messages", "tools", "conversation", "chat_template", "tokenize", "add_generation_prompt", "return_dict"}
        if taken := sorted(reserved & set(self.template)):
            raise ValueError(f"template: {taken[0]} is no argument to choose, each chat has its own")
        return self


class SourceConfig(Section):
    """Where prompts or conversations come from."""

    source: str = Field(description="JSONL or Parquet file with 'messages' or 'prompt' rows, 'hub:owner/name', or 'package:NAME'")
    families: list[str] | None = Field(None, description="package sources: which prompt families; None takes all of them")
    category: str = Field("chat", description="label by which acceptance is reported")
    limit: int | None = Field(None, ge=1, description="at most so many prompts, chosen by seed")


class HeldoutConfig(Section):
    """Prompts kept out of training, answered greedily and at the serving temperature."""

    prompts: int = Field(48, ge=1, description="held-out prompts taken from prep.sources, spread evenly over categories")
    extra: list[SourceConfig] = Field(default_factory=list, description="held-out prompts from elsewhere, never trained on")
    near_duplicate: float = Field(
        0.8, gt=0, le=1, description="Jaccard similarity of 5-gram shingles from which a training prompt counts as held-out"
    )


class RepliesConfig(Section):
    """How conversations get their replies."""

    mode: Literal["generate", "given", "server"] = Field(
        "generate", description="the target answers (on-policy), here or behind servers, or replies in the data are used"
    )
    temperatures: list[Annotated[float, Field(ge=0, le=2)]] = Field(
        [0.7], min_length=1, description="of training replies, 0 is greedy; of several, each prompt gets one, chosen by its key"
    )
    top_p: float = Field(1.0, gt=0, le=1)
    serving_temperature: float = Field(1.0, gt=0, le=2, description="of the second held-out set")
    max_new_tokens: int = Field(192, ge=1)
    batch_size: int = Field(64, ge=1, description="generate: sequences decoded together")
    unfinished: Literal["keep", "drop"] = Field("keep", description="replies cut by the limit: kept without an end token, or dropped")
    reasoning: Literal["keep", "drop"] = Field(
        "keep",
        description="of thinking models. keep: the template's default, and whatever the model writes is the reply; drop: prompts are "
        "rendered with thinking off, so a row is what such a request sees and writes, and a reply that thinks all the same is quarantined",
    )
    servers: list[str] = Field(
        default_factory=list, description="server: URLs of servers of the target; none: the engine of the engine section is started for it"
    )
    concurrency: int = Field(512, ge=1, le=65536, description="server: requests in flight, over all servers")
    timeout_s: float = Field(1800, gt=0, description="server: a request without a reply after so long is sent again")
    retries: int = Field(8, ge=0, description="server: so often a failed request is sent again before its prompt is quarantined")
    give_up_s: float = Field(120, gt=0, description="server: the run ends when no server has answered for so long")

    @model_validator(mode="after")
    def _check(self) -> "RepliesConfig":
        if self.servers and self.mode != "server":
            raise ValueError(f"servers are asked with mode: server, not with mode: {self.mode}")
        for url in self.servers:
            if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url):
                raise ValueError(f"servers: {url}: expected http://HOST:PORT")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("servers: one is there twice")
        return self


class StatesConfig(Section):
    """The hidden-state store."""

    backend: Literal["hf", "sglang", "vllm"] = Field(
        "hf", description="what runs the target: transformers here, or the engine of the engine section, whose workers write the states"
    )
    dtype: Literal["bfloat16", "fp8"] = Field("bfloat16", description="fp8 is e4m3 with one scale per 128 values")
    top_logprobs: int | None = Field(
        None, ge=1, description="keep this many log-probabilities of the draft vocabulary a token in place of the final state; None: final"
    )
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, min_length=1, description="k means HF hidden_states[k]; None: the warm start's own layers, from scratch [2, L//2, L-3]"
    )
    candidates: list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] | None = Field(
        None,
        min_length=2,
        description="layer lists among which the untouched warm start is measured, likeliest first; None: what its config can mean",
    )
    probe_tokens: int = Field(20_000, ge=1, description="tokens on which the warm start is measured, where it has to be")
    batch_tokens: int = Field(4096, ge=1, description="tokens of one capture forward, padding included")
    shard_mb: int = Field(256, ge=1, description="a shard is closed at this size")
    recheck: float = Field(0.02, ge=0, le=1, description="share of rows captured again, alone, and compared")

    @model_validator(mode="after")
    def _check(self) -> "StatesConfig":
        if self.layers and self.candidates:
            raise ValueError("layers and candidates: the one settles what the other would measure, leave one out")
        if self.top_logprobs and self.backend != "hf":
            raise ValueError(f"top_logprobs: backend {self.backend} stores final states only; set it to null, or take backend hf")
        return self


class PrepConfig(Section):
    """From prompts to hidden states."""

    sources: list[SourceConfig] = Field(min_length=1)
    heldout: HeldoutConfig = HeldoutConfig()
    replies: RepliesConfig = RepliesConfig()
    states: StatesConfig = StatesConfig()
    max_length: int = Field(2048, ge=8, description="rows longer than this many tokens are quarantined")
    max_quarantine: float = Field(0.1, ge=0, le=1, description="share of unusable rows above which the run stops")


class DrafterConfig(Section):
    """The drafter to start from, and the shape of a fresh one."""

    init: str = Field(description="'scratch', a drafter folder, or 'hub:owner/name[@revision]'")
    draft_vocab_size: int | None = Field(
        None,
        ge=1,
        description="size of the draft vocabulary, chosen on the training text; None keeps the warm start's, or the target's whole one",
    )
    intermediate_size: int | None = Field(None, ge=1, description="from scratch; None takes the target's")


class TrainConfig(Section):
    """Training-time test, optimiser and schedule."""

    ttt_steps: int = Field(7, ge=1, le=16)
    step_weight_decay: float = Field(0.8, gt=0, le=1, description="step j of the training-time test weighs decay ** j")
    epochs: int = Field(3, ge=1)
    max_steps: int | None = Field(None, ge=1, description="stop after so many optimiser steps")
    max_minutes: float | None = Field(
        None, gt=0, description="stop the stage after this long; the schedule follows the clock (not bit-reproducible)"
    )
    batch_tokens: int = Field(4096, ge=1, description="packed tokens of a micro-batch, per process")
    accumulation: int = Field(1, ge=1, description="micro-batches per optimiser step")
    learning_rate: float = Field(3e-4, gt=0)
    warmup_share: float = Field(0.05, ge=0, lt=1, description="share of the steps in which the rate climbs linearly")
    final_rate_share: float = Field(0.05, ge=0, le=1, description="cosine decay ends at this share of learning_rate")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    clip_norm: float = Field(0.5, gt=0)
    precision: Literal["bf16", "fp32"] = "bf16"
    evaluate_every: int = Field(50, ge=1, description="steps between offline acceptance measurements")
    checkpoint_every: int = Field(100, ge=1, description="steps between resumable checkpoints")
    keep_checkpoints: int = Field(2, ge=1)
    log_every: int = Field(5, ge=1)
    trackers: list[Literal["wandb", "tensorboard"]] = Field(default_factory=list)


Flags = dict[str, bool | int | float | str | Annotated[list[int | float | str], Field(min_length=1)]]


class EngineConfig(Section):
    """How the target and drafter are served for measuring."""

    kind: Literal["embedded", "sglang", "vllm"] = "embedded"
    python: str | None = Field(None, description="sglang, vllm: interpreter that has the engine installed; None takes the one eyas runs on")
    container: list[str] = Field(
        default_factory=list,
        description="command that runs the engine in a container, put before 'python3 -m ...', e.g. [docker, run, ..., IMAGE]",
    )
    version: str | None = Field(
        None,
        description="sglang, vllm: version that is to serve, e.g. 0.5.12; exports write layer ids as it reads them. None: the newest known",
    )
    environment: Path | None = Field(None, description="YAML file of environment variables for the server, proven in every worker")
    flags: Flags = Field(
        default_factory=dict,
        description="more flags of the engine, without dashes: {tp: 8, cuda-graph-bs: [1, 2, 4]}; true is a bare flag, false none",
    )
    draft_flags: Flags = Field(
        default_factory=dict,
        description="flags only with speculation: {speculative-draft-model-quantization: unquant}; vllm: keys of its --speculative-config",
    )
    draft_steps: int = Field(3, ge=1, le=16, description="drafts in a row before a verify step")
    topk: int = Field(1, ge=1, le=64, description="branches a draft step; 1 is a chain, more is a tree (sglang)")
    draft_tokens: int | None = Field(
        None, ge=2, le=512, description="tokens a verify step computes; None: draft_steps + 1, as a chain needs it"
    )
    sampling: Literal["sglang", "rejection"] = Field(
        "sglang", description="embedded, at temperature > 0: argmax drafts by SGLang's rule, or sampled drafts by rejection sampling"
    )
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0 takes a free one")
    context: int = Field(4096, ge=16, description="tokens of prompt and reply together")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    stuck_limit_s: float | None = Field(
        None, gt=0, description="give up a start that has shown no sign of life for so long; None waits on and says so"
    )

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.kind == "embedded" and (self.python or self.container or self.version or self.flags or self.draft_flags):
            raise ValueError(
                "python, container, version, flags and draft_flags are for sglang and vllm; the embedded engine runs in eyas itself"
            )
        if self.python and self.container:
            raise ValueError("python and container: a container brings its own python3, name one of the two")
        if self.topk > 1 and self.kind != "sglang":
            raise ValueError(f"topk {self.topk}: only sglang drafts trees, {self.kind} drafts one chain (topk 1)")
        if self.topk > 1 and self.draft_tokens is None:
            raise ValueError(f"topk {self.topk} needs draft_tokens: how many of the tree's tokens a verify step computes")
        if self.topk == 1 and self.draft_tokens not in (None, self.draft_steps + 1):
            raise ValueError(
                f"draft_tokens {self.draft_tokens}: a chain of {self.draft_steps} drafts has {self.draft_steps + 1} tokens to verify"
            )
        return self


class EvalConfig(Section):
    """What is measured."""

    temperature: float = Field(0.0, ge=0, le=2)
    max_new_tokens: int = Field(128, ge=1)
    prompts: int = Field(48, ge=1, description="held-out prompts served, spread evenly over categories")
    warmup_prompts: int = Field(2, ge=0)
    concurrency: list[Annotated[int, Field(ge=1, le=1024)]] = Field(
        [1], min_length=1, description="requests in flight; one measurement of all prompts for each level (sglang, vllm)"
    )
    bootstrap: int = Field(2000, ge=100, description="resamples behind each confidence interval")
    compare: list[str] = Field(
        default_factory=list, description="more drafter folders measured side by side; the warm start is always among them"
    )


class SweepConfig(Section):
    """Which engine settings ``eyas sweep`` measures, and how long it looks at each."""

    steps: list[Annotated[int, Field(ge=1, le=16)]] = Field([1, 2, 3, 4, 5, 7], min_length=1, description="draft steps in a row")
    topk: list[Annotated[int, Field(ge=1, le=64)]] = Field(
        [1], min_length=1, description="branches a draft step; 1 is a chain, more is a tree (sglang)"
    )
    draft_tokens: list[Annotated[int, Field(ge=2, le=512)]] = Field(
        default_factory=list, description="of trees: tokens a verify step computes; a chain always has one more than steps"
    )
    drafters: list[str] | None = Field(
        None, min_length=1, description="by name: starter, result, folder names of eval.compare; None takes all that there are"
    )
    prompts: int = Field(12, ge=2, description="held-out prompts at every point, always the same ones")
    max_new_tokens: int = Field(128, ge=8)
    margin: float | None = Field(
        0.03, ge=0, lt=1, description="a point that must stay behind by more than this share is not measured; None measures every point"
    )
    simulated_lengths: list[Annotated[float, Field(ge=1, le=17)]] = Field(
        [1.5, 2.5], min_length=1, description="acceptance lengths that `eyas sweep --simulate` has sglang pretend"
    )

    @model_validator(mode="after")
    def _check(self) -> "SweepConfig":
        if max(self.topk) > 1 and not self.draft_tokens:
            raise ValueError(f"topk {max(self.topk)} needs draft_tokens: how many of a tree's tokens a verify step computes")
        return self


class NodeConfig(Section):
    """The machine and the amount of work, for ``eyas plan`` alone: what neither the models nor the rest of the config tell.

    None is "not known", and what depends on it is left open. What the run has measured by itself goes before a value given here.
    """

    gpus: int = Field(1, ge=1, description="GPUs of the node: ranks of training, and together the target's in capture and serving")
    gpu_memory_gib: float | None = Field(None, gt=0, description="memory of one GPU")
    training_tflops: float | None = Field(None, gt=0, description="10^12 operations a second that one GPU reaches in training's products")
    bandwidth_gb_per_s: float | None = Field(None, gt=0, description="10^9 bytes a second that one GPU moves in its own memory")
    link_gb_per_s: float | None = Field(None, gt=0, description="10^9 bytes a second that each GPU sends while gradients are added up")
    prefill_tps: float | None = Field(None, gt=0, description="tokens a second that the target prefills, all GPUs together")
    reply_tps: float | None = Field(None, gt=0, description="tokens a second that the target writes, all requests in flight together")
    server_start_minutes: float | None = Field(None, gt=0, description="until the target's server answers")
    disk_gb: float | None = Field(None, gt=0, description="10^9 bytes of disk that the run may take")
    disk_mb_per_s: float | None = Field(None, gt=0, description="10^6 bytes a second that the disk takes for long")
    training_tokens: int | None = Field(None, ge=1, description="tokens of training text, prompts and replies together")
    reply_tokens: float | None = Field(None, gt=2, description="mean length of a reply")
    reply_share: float | None = Field(None, gt=0, le=1, description="share of the training text that is replies, the rest is prompts")
    draftable_share: float = Field(1.0, gt=0, le=1, description="share of reply tokens in the draft vocabulary; 1 plans for most work")
    baseline_tps: float | None = Field(None, gt=0, description="tokens a second of the server without speculation, one request")
    cycle_ms: float | None = Field(None, gt=0, description="milliseconds of one draft+verify cycle")
    acceptance_length: float | None = Field(None, ge=1, description="of the drafter that training starts from, served")
    want_tps: float | None = Field(None, gt=0, description="tokens a second that are wished for")


class Config(Section):
    """A whole run."""

    output: Path
    seed: int = Field(0, ge=0)
    target: TargetConfig
    prep: PrepConfig
    drafter: DrafterConfig
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    sweep: SweepConfig = SweepConfig()
    node: NodeConfig = NodeConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.drafter.init != "scratch" and self.drafter.intermediate_size:
            raise ValueError("drafter: intermediate_size shapes a fresh drafter; a warm start keeps its own")
        if self.drafter.init == "scratch" and self.prep.states.candidates:
            raise ValueError("prep.states.candidates are measured with a warm start, drafter.init is scratch: name prep.states.layers")
        if self.prep.states.backend not in ("hf", self.engine.kind):
            raise ValueError(
                f"prep.states.backend {self.prep.states.backend} needs engine.kind {self.prep.states.backend}, it is {self.engine.kind}"
            )
        levels = self.eval.concurrency
        if self.engine.kind == "embedded" and levels != [1]:
            raise ValueError(
                f"eval.concurrency {levels}: the embedded engine decodes one request at a time; leave it at [1], or name the engine.kind"
            )
        if len(set(levels)) < len(levels):
            raise ValueError(f"eval.concurrency {levels}: a level is there twice")
        if max(self.sweep.topk) > 1 and self.engine.kind != "sglang":
            raise ValueError(f"sweep: topk {max(self.sweep.topk)}: only sglang drafts trees, {self.engine.kind} drafts one chain (topk 1)")
        return self

    def folder(self, stage: str) -> Path:
        """Where a stage of this run writes, e.g. ``replies``, ``states/train``, ``train``, ``export``."""
        return self.output / stage


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML config and apply ``a.b=value`` overrides (values are YAML).

    Raises EyasError in one line: file, key, what is wrong, and the nearest known key for a misspelt one.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError:
        raise EyasError(f"config {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EyasError(f"cannot read config {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise EyasError(f"{path}{line}: not valid YAML: {reason}") from None
    if not isinstance(values, dict):
        raise EyasError(f"{path}: expected a mapping of sections (output, target, prep, ...), found {type(values).__name__}")
    for override in overrides or []:
        _apply(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise EyasError(f"{path}: " + "; ".join(_describe(item) for item in error.errors())) from None


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that a mapping has twice is an error; YAML's own loader drops the first value without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if any(key.value == earlier.value for earlier in keys[:number]):
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise EyasError(f"--set {override}: expected KEY=VALUE, e.g. --set train.epochs=1")
    *parents, leaf = key.split(".")
    section = values
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise EyasError(f"--set {override}: {parent} is not a section")
    try:
        section[leaf] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise EyasError(f"--set {override}: the value is not valid YAML") from None


def _describe(item: Any) -> str:
    path = [str(part) for part in item["loc"]]
    where = ".".join(path) or "config"
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], _known_keys(path[:-1]), n=1)
        return f"{where}: unknown key" + (f", did you mean {close[0]!r}?" if close else "")
    if item["type"] == "missing":
        return f"{where}: missing"
    got = f", got {item['input']!r}" if not isinstance(item["input"], dict) else ""
    return f"{where}: {item['msg'].removeprefix('Value error, ')}{got}"


def _known_keys(path: list[str]) -> list[str]:
    section: Any = Config
    for name in path:
        if name.isdigit():
            continue
        field = section.model_fields.get(name)
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        sections = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, Section)]
        if not sections:
            return []
        section = sections[0]
    return list(section.model_fields)
