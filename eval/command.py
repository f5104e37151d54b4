"""An engine's command line and environment, rendered from the typed config: what `eyas serve` runs, and what a user can paste.

| engine | command | draft_flags become |
|---|---|---|
| sglang | PYTHON -m sglang.launch_server --model-path ... --speculative-algorithm EAGLE3 ... | flags |
| vllm | PYTHON -m vllm.entrypoints.openai.api_server --model ... --speculative-config JSON | keys of that JSON |
| embedded | this Python -m eval.server JOB | (it has none) |

One SGLang or vLLM server has one behaviour: variant "none" is the baseline, another variant speculates with its drafter. The embedded
server holds all drafters and a request names one; its variant is the one for requests that name none.
"""

import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from eval.clients import BASELINE
from eval.environment import profile
from eval.starts import EMBEDDED
from eyas.config import Config, EngineConfig, Flags
from eyas.errors import EyasError

JOB = "job.json"
"""What the embedded server reads: config, drafters and the default one."""

# Flags that come from a config key of their own; engines take abbreviations of them too.
_SGLANG = {
    "model-path": "target.model",
    "revision": "target.revision",
    "trust-remote-code": "target.trust_remote_code",
    "context-length": "engine.context",
    "dtype": "engine.dtype",
    "host": "engine.host",
    "port": "engine.port",
    "speculative-algorithm": "the variant",
    "speculative-draft-model-path": "the variant",
    "speculative-draft-model-revision": "the variant",
    "speculative-num-steps": "engine.draft_steps",
    "speculative-eagle-topk": "engine.topk",
    "speculative-num-draft-tokens": "engine.draft_tokens",
}
_VLLM = {
    "model": "target.model",
    "revision": "target.revision",
    "trust-remote-code": "target.trust_remote_code",
    "max-model-len": "engine.context",
    "dtype": "engine.dtype",
    "host": "engine.host",
    "port": "engine.port",
    "speculative-config": "the variant and engine.draft_flags",
}
_VLLM_DRAFT = {
    "method": "the variant",
    "model": "the variant",
    "revision": "the variant",
    "num-speculative-tokens": "engine.draft_steps",
}


@dataclass(frozen=True)
class Launch:
    """A server as it is to be started."""

    command: list[str]
    environment: dict[str, str]
    """Variables on top of what eyas itself was started with."""
    url: str
    """Where it will answer."""
    kind: str
    container: list[str] = field(default_factory=list)

    def words(self, more: dict[str, str] | None = None) -> list[str]:
        """The whole command. A container gets the environment (and ``more``) inside, by ``env``: it inherits nothing."""
        if not self.container:
            return self.command
        assignments = [f"{name}={value}" for name, value in (self.environment | (more or {})).items()]
        return [*self.container, "env", *assignments, *self.command]

    def paste(self) -> str:
        """Environment and command for a shell, one option a line."""
        before = [] if self.container else [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines: list[str] = []
        for word in map(shlex.quote, self.words()):
            if not lines or word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {word}"
        return " \\\n  ".join([*before, *lines])


@dataclass(frozen=True)
class Addition:
    """What a server gets on top of the config, for a purpose of eyas' own; it overrides engine.flags and the environment profile."""

    flags: Flags = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that are lists (PYTHONPATH, SGLANG_PLUGINS) are put before what the server would have there."""


def launch(config: Config, variant: str, drafter: str | None, port: int, addition: Addition | None = None) -> Launch:
    """Render how ``variant`` is served.

    Args:
        config: target and engine sections decide.
        variant: "none", or the name of the drafter (embedded: of requests that name none).
        drafter: its folder or hub id ("hub:owner/name@revision"); None without speculation, and for the embedded engine.
        port: where it shall listen; not 0.
        addition: sglang, vllm: what it gets besides.

    Raises EyasError for a flag that eyas sets itself, and for a broken environment profile.
    """
    engine, addition = config.engine, addition or Addition()
    if engine.kind == "embedded":
        command = [sys.executable, "-m", "eval.server", str(config.folder("servers") / EMBEDDED / JOB)]
    else:
        render = _sglang if engine.kind == "sglang" else _vllm
        python = "python3" if engine.container else engine.python or sys.executable
        command = [python, "-m", *render(config, drafter if variant != BASELINE else None, port, addition.flags)]
    environment = _joined(_environment(engine), addition.environment)
    return Launch(command, environment, _url(engine.host, port), engine.kind, engine.container)


def model_path(config: Config) -> str:
    """The target as engines take it: the folder of a packaged one, a folder or a hub id as it stands."""
    if config.target.model.startswith("package:"):
        from eyas.packaged_target import smollm2_folder  # torch and transformers, for the one conversion

        if config.target.model != "package:smollm2":
            raise EyasError(f"target.model: no packaged target {config.target.model!r}, there is 'package:smollm2'")
        return str(smollm2_folder())
    return _expanded(config.target.model.removeprefix("hub:"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sglang(config: Config, drafter: str | None, port: int, added: Flags) -> list[str]:
    engine, flags = config.engine, _flags(config, "model-path", "context-length", port)
    flags |= _more(engine.flags, "engine.flags", _SGLANG)
    if drafter is not None:
        path, revision = _drafter(drafter)
        flags |= {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": path}
        if revision:
            flags["speculative-draft-model-revision"] = revision
        flags |= {
            "speculative-num-steps": engine.draft_steps,
            "speculative-eagle-topk": engine.topk,
            "speculative-num-draft-tokens": engine.draft_tokens or engine.draft_steps + 1,
        }
        flags |= _more(engine.draft_flags, "engine.draft_flags", _SGLANG)
    return ["sglang.launch_server", *_words(flags | added)]


def _vllm(config: Config, drafter: str | None, port: int, added: Flags) -> list[str]:
    engine, flags = config.engine, _flags(config, "model", "max-model-len", port)
    # Not the sampling that a model's generation_config.json proposes; and usage tells the cached tokens.
    flags |= {"generation-config": "vllm", "enable-prompt-tokens-details": True}
    flags |= _more(engine.flags, "engine.flags", _VLLM)
    if drafter is not None:
        path, revision = _drafter(drafter)
        speculative: dict[str, Any] = {"method": "eagle3", "model": path}
        if revision:
            speculative["revision"] = revision
        speculative["num_speculative_tokens"] = engine.draft_steps
        more = _more(engine.draft_flags, "engine.draft_flags", _VLLM_DRAFT)
        speculative |= {name.replace("-", "_"): value for name, value in more.items()}
        flags["speculative-config"] = json.dumps(speculative)
        # vLLM 0.32 on, and refused without speculation; false in engine.flags leaves it out, and an older vLLM to its counters.
        flags.setdefault("per-request-spec-decode-metrics", "summary")
    return ["vllm.entrypoints.openai.api_server", *_words(flags | added)]


def _flags(config: Config, model: str, context: str, port: int) -> Flags:
    """What both engines take; ``model`` and ``context`` are their names for these two."""
    engine, target = config.engine, config.target
    flags: Flags = {model: model_path(config)}
    if target.revision:
        flags["revision"] = target.revision
    return flags | {
        "trust-remote-code": target.trust_remote_code,
        context: engine.context,
        "dtype": engine.dtype,
        "host": engine.host,
        "port": port,
    }


def _drafter(name: str) -> tuple[str, str | None]:
    """Path or hub id as engines take it, and the hub revision."""
    if not name.startswith("hub:"):
        return _expanded(name), None
    repository, _, revision = name.removeprefix("hub:").partition("@")
    return repository, revision or None


def _expanded(name: str) -> str:
    """No shell reads the command, so nobody else puts the home folder in."""
    return str(Path(name).expanduser()) if name.startswith("~") else name


def _more(flags: Flags, where: str, own: dict[str, str]) -> Flags:
    """The user's flags by their plain names. Raises EyasError for one that eyas sets itself, or that abbreviates such a one."""
    plain = {name.lstrip("-").replace("_", "-"): value for name, value in flags.items()}
    for name in plain:
        meant = next((flag for flag in own if flag.startswith(name)), None)
        if meant is not None:
            raise EyasError(f"{where}: {name}: eyas sets {meant} itself, from {own[meant]}; take it out of {where}")
    return plain


def _words(flags: Flags) -> list[str]:
    """Flags as words: true is a bare flag, false leaves it out, a list has a word for each of its values."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not False:
            text = str(value)
            words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


def _environment(engine: EngineConfig) -> dict[str, str]:
    values = profile(engine.environment)
    if engine.kind == "embedded":
        return values
    # SGLang's and vLLM's workers write their titles over /proc/PID/environ, where the profile is to be proven, unless this is set.
    values = {"SPT_NOENV": "1"} | values
    if engine.kind == "vllm" and is_loopback(engine.host):
        values = {"VLLM_SERVER_DEV_MODE": "1"} | values  # routes that tell the resolved arguments and empty the prefix cache
    if engine.python and os.sep in engine.python and "PATH" not in values:
        # As an activated environment has it: engines compile kernels with the ninja that lies beside their interpreter.
        values = {"PATH": f"{Path(engine.python).absolute().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"} | values
    return values


_LISTS = {"PYTHONPATH": os.pathsep, "SGLANG_PLUGINS": ","}


def _joined(values: dict[str, str], added: dict[str, str]) -> dict[str, str]:
    """``values`` with ``added``, lists joined with what is there, in the profile or in eyas' own environment."""
    joined = dict(added)
    for name, between in _LISTS.items():
        there = values.get(name) or os.environ.get(name)
        if name in added and there:
            joined[name] = f"{added[name]}{between}{there}"
    return values | joined


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
