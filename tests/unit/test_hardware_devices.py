"""The device table: complete, consistent with the rates of its architectures, sourced, decimal."""

from __future__ import annotations

import importlib.resources
import re

import pytest

from flashdig.hardware import detect
from flashdig.hardware.arch import ARCHITECTURES, UnknownArchitectureError, architecture
from flashdig.hardware.devices import UnknownDeviceError, find_device, load_devices
from flashdig.hardware.names import nearest

DEVICES = load_devices()
NUMBERS = [
    "sm_count",
    "peak_clock_hz",
    "max_clock_hz",
    "memory_bytes",
    "memory_bytes_per_s",
    "l2_bytes",
    "last_level_cache_bytes",
    "power_watts",
    "nvlink_bytes_per_s",
    "pcie_bytes_per_s",
]


def test_the_devices_that_were_promised_are_there():
    assert set(DEVICES) == {
        "rtx-2070", "t4", "a100-40", "a100-80", "rtx-3090", "l4", "rtx-4090",
        "h100", "h100-pcie", "h200", "b200", "rtx-5090", "mi300x",
    }  # fmt: skip


@pytest.mark.parametrize("key", DEVICES)
def test_every_number_has_a_source_and_nothing_else_has(key):
    device = DEVICES[key]
    known = {name for name in NUMBERS if getattr(device, name) is not None}
    known |= {f"peak_flop_per_s.{dtype}" for dtype in device.peak_flop_per_s}
    assert set(device.sources) == known
    for citation in device.sources.values():
        assert len(citation) > 40
        assert "http" in citation or "CUDA device attributes" in citation or "PCI-SIG" in citation


@pytest.mark.parametrize("key", DEVICES)
def test_peaks_are_dense_rates_of_the_architecture(key):
    """Peak = SMs x rate of an SM x clock within 1 %; GeForce does half of it with float32 sums."""
    device = DEVICES[key]
    half_rate = key.startswith("rtx-")
    for dtype, peak in device.peak_flop_per_s.items():
        clock = device.peak_clocks_hz.get(dtype, device.clock_hz)
        rate = peak / device.sm_count / clock
        if dtype in ("float32", "float64"):
            if key != "b200":  # its vendor states no clock for these
                assert rate == pytest.approx(2 * device.arch.fma_per_clock, rel=0.015)
            continue
        expected = device.arch.mma_flop_per_clock[dtype] / (2 if half_rate else 1)
        assert rate == pytest.approx(expected, rel=0.015), dtype


@pytest.mark.parametrize("key", DEVICES)
def test_bandwidths_are_decimal(key):
    """3.35 TB/s once became 3.35 x 2^40 in a peer's table; no such factor may appear here."""
    for value in (DEVICES[key].memory_bytes_per_s, DEVICES[key].memory_bytes):
        assert value % 1e9 == 0
    assert DEVICES[key].l2_bytes % 1024 == 0


def test_the_table_speaks_decimal_units_only():
    text = importlib.resources.files("flashdig.hardware").joinpath("devices.toml").read_text()
    assert not re.search(r"\b[KMGT]iB\b", text)


def test_known_values():
    assert DEVICES["a100-80"].flop_per_s("float16") == 312e12
    assert DEVICES["a100-80"].flop_per_s("float16") / DEVICES["a100-80"].flop_per_s(
        "float32"
    ) == pytest.approx(16)
    assert DEVICES["h100"].memory_bytes_per_s == 3352e9
    assert DEVICES["h200"].flop_per_s("bfloat16", 1.98e9) == pytest.approx(1070.5e12, rel=1e-3)
    assert DEVICES["h200"].flop_per_s("float32", 1.98e9) == pytest.approx(66.9e12)
    assert DEVICES["h200"].exp2_per_s(1.98e9) == 16 * 132 * 1.98e9
    assert DEVICES["b200"].clock_hz == pytest.approx(1.856e9, rel=1e-3)
    assert DEVICES["mi300x"].cache_bytes > DEVICES["mi300x"].l2_bytes


def test_unknown_stays_unknown():
    assert DEVICES["t4"].flop_per_s("bfloat16") is None
    assert DEVICES["mi300x"].exp2_per_s() is None
    assert DEVICES["l4"].nvlink_bytes_per_s is None
    assert DEVICES["b200"].peak_clock_hz is None
    assert [key for key, device in DEVICES.items() if device.measured] == ["h200"]


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("h200", "h200"), ("H200", "h200"), ("NVIDIA H200", "h200"), ("a100", "a100-80"),
        ("RTX 4090", "rtx-4090"), ("4090", "rtx-4090"), ("Tesla T4", "t4"), ("MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_names_are_found_in_any_spelling(spelling, key):
    assert find_device(spelling).key == key


def test_an_unknown_device_names_the_nearest_and_all():
    with pytest.raises(UnknownDeviceError, match=r"device 'h20'; nearest: h200, .*rtx-5090"):
        find_device("h20")


def test_nearest_is_never_empty():
    assert nearest("zzz", ["a", "b"]) != []
    assert nearest("V2", ["v1", "v2", "naive"])[0] == "v2"


@pytest.mark.parametrize("spelling", ["9.0", "sm_90", "sm_90a"])
def test_architectures_are_found_in_any_spelling(spelling):
    assert architecture(spelling).name == "Hopper"


def test_every_device_has_its_architecture_and_unknown_ones_are_refused():
    assert {device.arch.key for device in DEVICES.values()} <= set(ARCHITECTURES)
    with pytest.raises(UnknownArchitectureError, match=r"nearest: .*all: 7\.5"):
        architecture("9.1")


@pytest.mark.parametrize(
    ("key", "shared_per_sm", "shared_per_block", "warps", "blocks"),
    [
        ("7.5", 65536, 65536, 32, 16),
        ("8.0", 167936, 166912, 64, 32),
        ("8.6", 102400, 101376, 48, 16),
        ("8.9", 102400, 101376, 48, 24),
        ("9.0", 233472, 232448, 64, 32),  # as an H200's driver reports it
        ("10.0", 233472, 232448, 64, 32),
        ("12.0", 102400, 101376, 48, 24),
    ],
)
def test_limits_of_an_sm(key, shared_per_sm, shared_per_block, warps, blocks):
    arch = ARCHITECTURES[key]
    assert (arch.shared_bytes, arch.shared_bytes_per_block) == (shared_per_sm, shared_per_block)
    assert (arch.max_warps, arch.max_blocks) == (warps, blocks)
    assert arch.registers == 65536
    assert arch.max_threads == warps * 32


def test_exact_products_are_recognised_and_their_variants_are_not():
    assert detect.device_of_name("NVIDIA H200").key == "h200"
    assert detect.device_of_name("NVIDIA H100 80GB HBM3").key == "h100"
    assert detect.device_of_name("NVIDIA H100 PCIe").key == "h100-pcie"
    assert detect.device_of_name("NVIDIA A100-SXM4-40GB").key == "a100-40"
    for other in ("NVIDIA L40S", "NVIDIA GeForce RTX 2070 SUPER", "NVIDIA GeForce RTX 4090 D"):
        assert detect.device_of_name(other) is None


def _fake_smi(tmp_path, monkeypatch, script):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_detection_reads_what_the_driver_says(tmp_path, monkeypatch):
    _fake_smi(
        tmp_path,
        monkeypatch,
        'echo "NVIDIA H200, 9.0, 345, 1980, 700.00"; echo "Quadro X, 7.5, 300, 1500, [N/A]"',
    )
    first, second = detect.detect_gpus()
    assert first.device is find_device("h200")
    assert (first.clock_hz, first.max_clock_hz, first.power_limit_watts) == (345e6, 1980e6, 700)
    assert (second.device, second.power_limit_watts) == (None, None)
    assert detect.this_device().key == "h200"


def test_detection_without_a_driver_finds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect.detect_gpus() == []
    with pytest.raises(UnknownDeviceError, match="no NVIDIA GPU found"):
        detect.this_device()


def test_a_failing_driver_and_an_unknown_gpu_are_errors(tmp_path, monkeypatch):
    _fake_smi(tmp_path, monkeypatch, 'echo "driver mismatch" >&2; exit 9')
    with pytest.raises(OSError, match="code 9: driver mismatch"):
        detect.detect_gpus()
    _fake_smi(tmp_path, monkeypatch, 'echo "Quadro X, 7.5, 300, 1500, 100"')
    with pytest.raises(UnknownDeviceError, match="no row for 'Quadro X'"):
        detect.this_device()
    _fake_smi(tmp_path, monkeypatch, 'echo "Quadro X, 7.5"')
    with pytest.raises(OSError, match="not the five fields"):
        detect.detect_gpus()
