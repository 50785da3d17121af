"""GPUs that no table has are measured once, and those that are too old get one sentence."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compiled import unclean
from cuda.bindings import driver

from onnx_fuse import config
from onnx_fuse.cuda import nvrtc
from onnx_fuse.errors import DeviceError
from onnx_fuse.program.launch import Launch, Num
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.runtime import calibration

NEW = replace(CHIPS["4090"], name="NVIDIA GeForce RTX 5090", arch="sm_120a", sm_count=170)
PEAKS = {"FMA": 105e12, "DMMA": 1.6e12, "TF32": 105e12, "BF16": 210e12, "F16": 210e12}
COPIED, CACHED = 1.5e12, 5e12


class FakeTimer:
    """A chip of these peaks; the n-th measurement may fail, or take a time that is none."""

    def __init__(self, fails: int = 0, wrong: float = 0.0) -> None:
        self.fails, self.wrong, self.count = fails, wrong, 0

    def seconds(self, launch: Launch, nbytes: Mapping[str, int]) -> float:
        self.count += 1
        if self.count == self.fails:
            if not self.wrong:
                raise DeviceError("a launch: CUDA_ERROR_UNKNOWN")
            return self.wrong
        if launch.entry == "copy":
            rounds = launch.args[-1].value if isinstance(launch.args[-1], Num) else 0
            fits = sum(nbytes.values()) <= NEW.l2_bytes
            return rounds * sum(nbytes.values()) / (CACHED if fits else COPIED)
        macros = dict(launch.defines)
        (kind,) = macros.keys() & PEAKS.keys()
        rounds = next(a.value for a in launch.args if isinstance(a, Num))
        each = {"FMA": 16 * 2 * 32, "DMMA": 8 * 2 * 8 * 8 * 4, "TF32": 8 * 2 * 16 * 8 * 8,
                "BF16": 8 * 2 * 16 * 8 * 16, "F16": 8 * 2 * 16 * 8 * 16}[kind]  # fmt: skip
        warps = launch.grid[0] * launch.block[0] // 32
        return warps * rounds * each / PEAKS[kind]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))


def test_a_new_gpu_is_measured_once_and_its_rates_are_kept(tmp_path: Path) -> None:
    timer = FakeTimer()
    found = calibration.calibrated(NEW, timer)
    assert found.hw.rate("bfloat16") == pytest.approx(0.8 * PEAKS["BF16"])
    assert found.hw.rate("tf32") == pytest.approx(0.8 * PEAKS["TF32"])
    assert found.hw.rate("float64") == pytest.approx(0.8 * PEAKS["DMMA"])
    assert found.hw.bandwidth == pytest.approx(COPIED)
    assert found.hw.cached_bandwidth == pytest.approx(CACHED)
    rest = {"flops": NEW.flops, "bandwidth": NEW.bandwidth, "l2_bandwidth": 0.0}
    assert replace(found.hw, **rest) == NEW
    [place] = (tmp_path / "chips").iterdir()
    assert found.source == f"rates measured on this GPU, cached in {place}"
    assert calibration.calibrated(NEW, FakeTimer(fails=1)) == found  # nothing is measured again
    measured = timer.count
    assert calibration.calibrated(replace(NEW, driver=1), timer).hw.driver == 1
    assert timer.count == 2 * measured  # another driver's are others


def test_of_two_processes_the_first_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(FakeTimer):
        def seconds(self, launch: Launch, nbytes: Mapping[str, int]) -> float:
            if not self.count:
                calibration.calibrated(NEW, FakeTimer())
            return 2 * super().seconds(launch, nbytes)

    late = calibration.calibrated(NEW, Late())
    assert late.hw.bandwidth == pytest.approx(COPIED)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"flops": {}, "bandwidth": 1}'])
def test_a_torn_file_is_measured_again(tmp_path: Path, text: str) -> None:
    whole = calibration.calibrated(NEW, FakeTimer())
    [place] = (tmp_path / "chips").iterdir()
    place.write_text(text)
    assert calibration.calibrated(NEW, FakeTimer()) == whole
    assert calibration.calibrated(NEW, FakeTimer(fails=1)) == whole


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0])
@pytest.mark.parametrize("fails", [1, 6, 7])
def test_rates_that_cannot_be_measured_are_guessed_and_said(
    tmp_path: Path, fails: int, wrong: float
) -> None:
    with pytest.warns(UserWarning, match="RTX 5090: its rates could not be measured .*similar GPU"):
        found = calibration.calibrated(NEW, FakeTimer(fails, wrong))
    assert found.hw == NEW
    assert "measuring failed" in found.source
    assert not (tmp_path / "chips").exists()


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="rates of NVIDIA GeForce RTX 5090 are not cached"):
        found = calibration.calibrated(NEW, FakeTimer())
    assert found.hw.bandwidth == pytest.approx(COPIED)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_gpu_of_the_table_is_not_measured(chip: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = calibration.calibrated(CHIPS[chip], FakeTimer(fails=1))
    assert found == calibration.Calibrated(CHIPS[chip], "rates of the table")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_what_measures_compiles_to_registers_alone(arch: str) -> None:
    launches: list[Launch] = []

    class Keeping(FakeTimer):
        def seconds(self, launch: Launch, nbytes: Mapping[str, int]) -> float:
            launches.append(launch)
            return super().seconds(launch, nbytes)

    calibration.measured(NEW, Keeping())
    assert len(launches) == 7
    assert unclean(launches, arch) == []


# ---- chips that are too old ----------------------------------------------------------------------


def _driver(monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int) -> None:
    kind = driver.CUdevice_attribute
    known = {
        kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
        kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
    }
    ok = driver.CUresult.CUDA_SUCCESS
    fakes: dict[str, Any] = {
        "cuInit": lambda flags: (ok,),
        "cuDeviceGetName": lambda length, device: (ok, name.encode() + b"\0"),
        "cuDeviceGetAttribute": lambda attribute, device: (ok, known.get(attribute, 80)),
        "cuDriverGetVersion": lambda: (ok, 13000),
    }
    for called, fake in fakes.items():
        monkeypatch.setattr(driver, called, fake)


@pytest.mark.parametrize(
    ("name", "major", "minor"), [("Tesla V100-SXM2-16GB", 7, 0), ("Tesla T4", 7, 5)]
)
def test_a_gpu_before_ampere_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int
) -> None:
    _driver(monkeypatch, name, major, minor)
    text = rf"^{name} has compute capability {major}\.{minor}, and the kernels need 8\.0 .*'cpu'$"
    with pytest.raises(DeviceError, match=text):
        Hardware.detect()
    with pytest.raises(DeviceError, match=text):
        calibration.of()


def test_code_for_an_architecture_before_ampere_is_refused_in_one_sentence() -> None:
    with pytest.raises(DeviceError, match=r"^sm_75 has compute capability 7\.5, and the kernels"):
        nvrtc.compile('extern "C" __global__ void f() {}\n', (), "sm_75")
