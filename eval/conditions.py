"""Under what conditions a leg was measured: versions, flags, environment, and what the machine did meanwhile.

Written to ``bench/conditions.jsonl``: one line when a leg begins, one when it ends, so that a speed that fell from one day to the next can
be explained by what differs (``eyas compare``). Clocks, temperatures, power and load are sampled all through the leg and summed up in its
last line, because an idle GPU shows an idle clock. GPUs are read by NVML (pip install nvidia-ml-py) where there are any.

Environment variables are written down only when they steer an engine or the profile of the run names them, and never those that are secret.
"""

import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from eval.environment import profile
from eyas.config import Config
from eyas.files import JsonlAppender, read_jsonl
from eyas.manifest import versions

CONDITIONS = "conditions.jsonl"
SAMPLE_EVERY_S = 5.0
_STEERING = ("NCCL_", "CUDA_", "OMP_", "MKL_", "TORCH_", "SGLANG_", "SGL_", "VLLM_", "EYAS_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_CPUINFO, _CPUFREQ = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cpufreq")


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment, as NVML tells it; None where it does not."""

    index: int
    name: str
    driver: str | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    pcie: str | None
    """Generation and width of the link now, e.g. 'gen 5 x16'."""
    throttle: list[str]
    """Why the clock is below its limit right now; idle is not counted."""


@dataclass(frozen=True)
class Machine:
    """The machine at one moment."""

    load: float | None
    """Load average of the last minute: processes that run or want to."""
    cpu_mhz: float | None
    """Mean clock of the cores."""
    governor: str | None
    gpus: list[Gpu] = field(default_factory=list)


@dataclass(frozen=True)
class LegConditions:
    """A line of conditions.jsonl."""

    leg: str
    variants: list[str]
    moment: str
    """'start' or 'end' of the leg."""
    at: float
    """Seconds since 1970."""
    versions: dict[str, str]
    engine: str | None
    """Version of the server's engine, as it tells it."""
    flags: dict[str, Any]
    environment: dict[str, str]
    machine: Machine
    during: dict[str, float] = field(default_factory=dict)
    """Means over the leg so far: load, cpu_mhz, and for each GPU i gpu<i>.sm_clock_mhz ...; throttling as a share of the samples."""


@dataclass(frozen=True)
class LegRow:
    """One leg as it ran: when, and what the machine did meanwhile, on average."""

    leg: str
    variants: list[str]
    start: str
    """Local time."""
    minutes: float
    load: float | None
    cpu_mhz: float | None
    gpus: int
    gpu_clock_mhz: tuple[float, float] | None
    """Of the slowest and of the fastest GPU."""
    gpu_temperature_c: float | None
    """Of the hottest."""
    gpu_power_w: float | None
    """Of all together."""
    gpu_throttled: float | None
    """Share of the samples in which something held the clock of the worst GPU down."""


class Recorder:
    """Samples the machine in a thread of its own while a leg runs, and writes the leg's two lines. Use as a context manager."""

    def __init__(self, folder: Path, config: Config, leg: str, variants: Sequence[str], info: Mapping[str, Any]) -> None:
        self._path = folder / CONDITIONS
        self._config, self._leg, self._variants, self._info = config, leg, list(variants), info
        self._stop = threading.Event()
        self._samples: list[Machine] = []
        self._thread = threading.Thread(target=self._run, name="conditions", daemon=True)

    def __enter__(self) -> "Recorder":
        self._write("start")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._write("end")

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._samples.append(read_machine())

    def _write(self, moment: str) -> None:
        machine = read_machine()
        self._samples.append(machine)
        line = LegConditions(
            leg=self._leg,
            variants=self._variants,
            moment=moment,
            at=time.time(),
            versions=versions(),
            engine=_engine_version(self._info),
            flags=flags_of(self._config),
            environment=steering_environment(os.environ, self._config),
            machine=machine,
            during=means(self._samples),
        )
        with JsonlAppender(self._path) as file:
            file.append(asdict(line))


def read_conditions(folder: Path) -> list[dict[str, Any]]:
    """The lines of a bench folder, in order of writing; none where nothing was recorded."""
    path = Path(folder) / CONDITIONS
    return [row for _, row in read_jsonl(path)] if path.exists() else []


def leg_rows(recorded: Sequence[Mapping[str, Any]]) -> list[LegRow]:
    """The legs of a conditions.jsonl; one that was interrupted and resumed has a row for each time."""
    rows, begun = [], dict[tuple[str, tuple[str, ...]], float]()
    for line in recorded:
        name = (str(line["leg"]), tuple(line["variants"]))
        if line["moment"] == "start":
            begun[name] = float(line["at"])
        elif name in begun:
            rows.append(_leg_row(line, begun.pop(name)))
    return rows


def _leg_row(line: Mapping[str, Any], start: float) -> LegRow:
    during: Mapping[str, float] = line["during"]

    def gpus(name: str) -> list[float]:
        return [value for key, value in during.items() if key.startswith("gpu") and key.endswith(f".{name}")]

    clocks, power = gpus("sm_clock_mhz"), gpus("power_w")
    return LegRow(
        leg=line["leg"],
        variants=list(line["variants"]),
        start=datetime.fromtimestamp(start).astimezone().isoformat(" ", "minutes"),
        minutes=(line["at"] - start) / 60,
        load=during.get("load"),
        cpu_mhz=during.get("cpu_mhz"),
        gpus=len(line["machine"]["gpus"]),
        gpu_clock_mhz=(min(clocks), max(clocks)) if clocks else None,
        gpu_temperature_c=max(gpus("temperature_c"), default=None),
        gpu_power_w=sum(power) if power else None,
        gpu_throttled=max(gpus("throttled"), default=None),
    )


def flags_of(config: Config) -> dict[str, Any]:
    """What the server is started with."""
    engine = config.engine.model_dump(mode="json", exclude={"host", "port", "environment", "stuck_limit_s"})
    return {"target": config.target.model, "device": config.target.device, **engine}


def steering_environment(environment: Mapping[str, str], config: Config) -> dict[str, str]:
    """The variables that steer an engine, and those of the run's profile; none with a name that a secret would have."""
    named = profile(config.engine.environment)
    return {
        name: value
        for name, value in sorted({**environment, **named}.items())
        if (name.startswith(_STEERING) or name in named) and not any(word in name.upper() for word in _SECRET)
    }


def machine_of_client() -> dict[str, Any]:
    """The machine of the client (and of the embedded server), as far as it does not change: what the times depend on."""
    return {
        "processor": _processor(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def read_machine() -> Machine:
    """The machine now."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Machine(load, _cpu_mhz(), _line(_CPUFREQ / "scaling_governor"), read_gpus())


def read_gpus() -> list[Gpu]:
    """All GPUs that NVML shows; none without NVML, without its Python binding, or without a GPU."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no binding, no library, no driver: the machine has no GPU that could be asked
        return []
    try:
        return [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def means(samples: Sequence[Machine]) -> dict[str, float]:
    """Means of everything that moves; ``gpu<i>.throttled`` is the share of samples in which something held the clock down."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        values["load"] += [] if sample.load is None else [sample.load]
        values["cpu_mhz"] += [] if sample.cpu_mhz is None else [sample.cpu_mhz]
        for gpu in sample.gpus:
            for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w"):
                value = getattr(gpu, name)
                values[f"gpu{gpu.index}.{name}"] += [] if value is None else [value]
            values[f"gpu{gpu.index}.throttled"].append(float(bool(gpu.throttle)))
    return {name: round(sum(found) / len(found), 3) for name, found in values.items() if found}


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any) -> Any:
        """What NVML says; None where this GPU or this version of NVML does not."""
        try:
            value = getattr(nvml, name)(handle, *arguments)
        except Exception:  # noqa: BLE001 - NVML has an error of its own for every reason of not supporting something
            return None
        return value.decode() if isinstance(value, bytes) else value

    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    generation, width = ask("nvmlDeviceGetCurrPcieLinkGeneration"), ask("nvmlDeviceGetCurrPcieLinkWidth")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before NVML 12.2
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return Gpu(
        index=index,
        name=str(ask("nvmlDeviceGetName")),
        driver=_driver(nvml),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        pcie=None if generation is None or width is None else f"gen {generation} x{width}",
        throttle=throttle_reasons(reasons or 0),
    )


def _driver(nvml: Any) -> str | None:
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 - as above
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


_THROTTLE = {
    0x02: "clocks set by the application",
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}


def throttle_reasons(mask: int) -> list[str]:
    """NVML's bit mask in words; 'idle' (bit 0) is no throttling."""
    return [name for bit, name in _THROTTLE.items() if mask & bit]


def _engine_version(info: Mapping[str, Any]) -> str | None:
    version = info.get("version")
    return str(version) if version else None


def _cpu_mhz() -> float | None:
    clocks = [float(line.partition(":")[2]) for line in _lines(_CPUINFO) if line.lower().startswith("cpu mhz")]
    return round(sum(clocks) / len(clocks), 1) if clocks else None


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _lines(_CPUINFO) if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _line(path: Path) -> str | None:
    return next(iter(_lines(path)), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
