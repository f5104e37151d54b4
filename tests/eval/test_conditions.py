import os
import sys
from types import SimpleNamespace

import pytest

from eval.conditions import Gpu, Machine, Recorder, leg_rows, means, read_conditions, read_gpus, steering_environment, throttle_reasons
from tests.eval.recorded import conditions, config_at


class Nvml:
    """Stands for NVML's Python binding: two GPUs, of which the second tells no power, and throttling only under the older name."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    running = 0

    def nvmlInit(self):
        self.running += 1

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return SimpleNamespace(index=index)

    def nvmlSystemGetDriverVersion(self):
        return b"580.95.05"

    def nvmlDeviceGetName(self, handle):
        return b"RTX PRO 6000"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 2430, 2: 12481}[kind] - 30 * handle.index

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61 + handle.index

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle.index:
            raise RuntimeError("Not Supported")
        return 305_400

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 600_000

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        if handle.index:
            raise RuntimeError("Function Not Found")
        return 0x4 | 0x1

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x20 | 0x40


@pytest.fixture
def nvml(monkeypatch):
    binding = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    return binding


def test_every_gpu_is_read_in_plain_units_and_what_it_does_not_tell_is_none(nvml):
    common = {"name": "RTX PRO 6000", "driver": "580.95.05", "power_limit_w": 600.0, "pcie": "gen 5 x16"}
    assert read_gpus() == [
        Gpu(index=0, sm_clock_mhz=2430, memory_clock_mhz=12481, temperature_c=61, power_w=305.4, throttle=["software power cap"], **common),
        Gpu(
            index=1,
            sm_clock_mhz=2400,
            memory_clock_mhz=12451,
            temperature_c=62,
            power_w=None,
            throttle=["software thermal slowdown", "hardware thermal slowdown"],
            **common,
        ),
    ]
    assert nvml.running == 0


def test_a_machine_without_nvml_has_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert read_gpus() == []


def test_a_driver_that_does_not_answer_is_no_gpu(nvml, monkeypatch):
    monkeypatch.setattr(Nvml, "nvmlInit", lambda self: 1 / 0)
    assert read_gpus() == []


def test_an_idle_clock_is_not_throttled():
    assert throttle_reasons(0x1) == []
    assert throttle_reasons(0x88) == ["hardware slowdown", "hardware power brake"]


def test_means_are_taken_over_all_samples_and_throttling_as_their_share():
    gpu = Gpu(0, "GPU", None, 2400, None, 60, 300, 600, None, [])
    hot = Gpu(0, "GPU", None, 2100, None, 80, 300, 600, None, ["hardware slowdown"])
    found = means([Machine(1.0, None, None, [gpu]), Machine(2.0, None, None, [gpu]), Machine(6.0, None, None, [hot])])
    assert found == {
        "load": 3.0,
        "gpu0.sm_clock_mhz": 2300,
        "gpu0.temperature_c": 66.667,
        "gpu0.power_w": 300,
        "gpu0.throttled": 0.333,
    }


def test_a_leg_leaves_a_line_at_its_start_and_one_with_its_means_at_its_end(tmp_path, nvml, monkeypatch):
    monkeypatch.setattr("eval.conditions.SAMPLE_EVERY_S", 0.005)
    asked, counted = [], Nvml.nvmlDeviceGetCount
    monkeypatch.setattr(Nvml, "nvmlDeviceGetCount", lambda self: asked.append(1) or counted(self))
    with Recorder(tmp_path, config_at(tmp_path), "before", ["none"], {"version": "0.5.23"}):
        while len(asked) < 5:  # the two lines and samples between them
            pass
    start, end = read_conditions(tmp_path)
    assert (start["moment"], end["moment"], end["leg"], end["engine"]) == ("start", "end", "before", "0.5.23")
    assert end["during"]["gpu1.sm_clock_mhz"] == 2400
    assert end["during"]["gpu1.throttled"] == 1
    assert start["machine"]["gpus"][0]["power_w"] == 305.4
    assert start["at"] <= end["at"]
    assert {"python", "torch"} <= set(start["versions"])


def test_a_leg_that_fails_still_leaves_its_end(tmp_path):
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, config_at(tmp_path), "before", ["none"], {}):
        _ = 1 / 0
    assert [line["moment"] for line in read_conditions(tmp_path)] == ["start", "end"]


def test_only_what_steers_an_engine_is_written_down_of_the_environment_and_never_a_secret(tmp_path):
    (tmp_path / "env.yaml").write_text("NCCL_ALGO: Ring\nMY_SWITCH: 1\nMY_API_KEY: hush\n")
    config = config_at(tmp_path)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"environment": tmp_path / "env.yaml"})})
    environment = {"PATH": "/bin", "HOME": "/root", "SGLANG_API_KEY": "hush", "VLLM_USE_X": "1", "NCCL_ALGO": "Tree", "AWS_SECRET": "hush"}
    assert steering_environment(environment, config) == {"MY_SWITCH": "1", "NCCL_ALGO": "Ring", "VLLM_USE_X": "1"}
    assert "PATH" in os.environ  # read, never changed


def test_legs_are_summed_up_one_row_each_and_an_interrupted_one_again():
    lines = conditions(gpus=[(2400.0, 61.0, 300.0), (2350.0, 66.0, 310.0)])
    rows = leg_rows([*lines[:2], *lines])
    assert [(row.leg, row.minutes) for row in rows] == [("before", 5), ("before", 5), ("between", 5), ("after", 5)]
    row = rows[0]
    assert (row.gpus, row.gpu_clock_mhz, row.gpu_temperature_c, row.gpu_power_w, row.gpu_throttled) == (2, (2350, 2400), 66, 610, 0)
    assert leg_rows(lines[:1]) == []  # killed


def test_a_machine_without_gpus_has_no_numbers_of_them():
    row = leg_rows(conditions())[0]
    assert (row.gpus, row.gpu_clock_mhz, row.gpu_temperature_c, row.gpu_power_w, row.gpu_throttled) == (0, None, None, None, None)
