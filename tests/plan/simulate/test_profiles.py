"""All profiles can be read and used, and a mistake is reported with file, line and key."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megascale.config.profile_files import path_of, profile_names
from megascale.core.errors import ConfigError
from megascale.plan.simulate import profiles


@pytest.mark.parametrize("name", profile_names("hardware"))
def test_hardware(name: str) -> None:
    cluster = profiles.hardware(name)
    assert cluster.name == name
    assert 1e13 < cluster.device.peak_of("fp16") < 1e16
    assert cluster.memory_limit(1) > 20 << 30
    assert cluster.node.bandwidth > cluster.network.bandwidth / cluster.node.devices


@pytest.mark.parametrize("name", profile_names("stacks"))
def test_stacks(name: str) -> None:
    assert profiles.stack(name).name == name


def test_extends_inherits_values() -> None:
    assert profiles.hardware("a100-40g").attained == profiles.hardware("a100-80g").attained
    assert profiles.hardware("a100-40g").device.bandwidth < profiles.hardware("a100-80g").device.bandwidth


def test_an_unknown_name_suggests_similar_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no profile 'a100-40'  -> did you mean 'a100-40g'\?"):
        profiles.hardware("a100-40")
    with pytest.raises(ConfigError, match=r"there is no profile 'a100-8'  -> one of a100-80g, a100-80g-400g, "):
        profiles.hardware("a100-8")
    with pytest.raises(ConfigError, match=r"there is no profile 'a100-80gb'  -> did you mean 'a100-80g'\?"):
        profiles.hardware("a100-80gb")
    with pytest.raises(ConfigError, match=r"one of deepspeed.*, or a file of your own"):
        profiles.stack("??")


def test_mistakes_are_reported_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        '[device]\nmemory = "80 GB"\nbandwidth = 1e12\nunits = 100\naccelerator = "A101"\n'
        "[node]\nbandwith = 1\nbandwidth = 450\n"
    )
    with pytest.raises(ConfigError) as caught:
        profiles.hardware(str(path))
    text = str(caught.value)
    for part in (
        f"{path}:2  device.memory: '80 GB': Input should be a valid integer  -> bytes",
        f"{path}:5  device.accelerator: 'A101': ",
        "'A101' is not one of",
        f"{path}:7  node.bandwith: there is no such key  -> did you mean 'bandwidth'?",
        f"{path}:8  node.bandwidth: 450: Input should be greater than or equal to 1000000  -> bytes/s each way",
        "network: Field required",
    ):
        assert part in text


def test_rates_in_other_units_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    base = path_of("hardware", "h100").resolve()
    path.write_text(f'extends = "{base}"\n[device]\nbandwidth = 3350\npeak = {{ bf17 = 1e15 }}\n')
    with pytest.raises(ConfigError) as caught:
        profiles.hardware(str(path))
    text = str(caught.value)
    assert f"{path}:3  device.bandwidth: 3350: Input should be greater than or equal to 1000000" in text
    assert f"{path}:4  device.peak.bf17: 'bf17': String should match pattern" in text


def test_bytes_in_exponent_notation(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'extends = "{path_of("hardware", "h100").resolve()}"\n[device]\nmemory = 90e9\n')
    assert profiles.hardware(str(path)).device.memory == 90_000_000_000


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision: the device multiplies no fp8"):
        profiles.hardware("a100-80g").device.peak_of("fp8")


def test_bf16_without_a_peak_takes_the_peak_of_fp16() -> None:
    assert profiles.hardware("v100").device.peak_of("bf16") == profiles.hardware("v100").device.peak_of("fp16")


@pytest.mark.parametrize("wrong", ["memory = 2_000_000_000", "peak = { bf16 = 989 }"])
def test_values_in_other_units_are_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    base = path_of("hardware", "h100").resolve()
    path.write_text(f'extends = "{base}"\n[device]\n{wrong}\n')
    with pytest.raises(ConfigError, match="device"):
        profiles.hardware(str(path))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("gradient_bytes = 16", r"gradient_bytes: 16: Input should be 0, 2, 4 or 8  -> of a reduced element"),
        ("gradient_bytes = true", "gradient_bytes: True: Input should be 0, 2, 4 or 8"),
        ('fp8_weights = "none"', "fp8_weights: 'none': Input should be 'beside' or 'instead'"),
        ("attained.scale_loss = 1.5", "attained.scale_loss: 1.5: Input should be less than 1"),
        ('attention = "flash4"', "attention: 'flash4': Input should be 'unfused', 'flash1', 'triton'"),
    ],
)
def test_wrong_values_of_a_stack_are_refused(wrong: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f"{wrong}\n")
    with pytest.raises(ConfigError, match=message):
        profiles.stack(str(path))


def test_gemm_shares_by_year(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    base = path_of("hardware", "h100").resolve()
    path.write_text(f'extends = "{base}"\n[attained]\ngemm = {{ 2021 = 0.6, 2025 = 0.7 }}\n')
    attained = profiles.hardware(str(path)).attained
    assert [attained.gemm_share(year) for year in (2019, 2022, 2026)] == [0.6, 0.6, 0.7]
    path.write_text(f'extends = "{base}"\n[attained]\ngemm = {{ 21 = 0.6 }}\n')
    with pytest.raises(ConfigError, match=r"attained\.gemm"):
        profiles.hardware(str(path))


def test_expected_errors_by_accelerator_and_measured_pairs() -> None:
    a100, v100 = profiles.hardware("a100-80g-roce"), profiles.hardware("v100")
    ours, other = profiles.stack("megascale-2024"), profiles.stack("nanotron")
    error = profiles.expected_error(a100)
    assert error and 0.01 < error < 0.2 and error == profiles.expected_error(profiles.hardware("a100-40g"))
    assert profiles.expected_error(v100) is None
    assert profiles.measured(a100, ours) and not profiles.measured(a100, other)
    here = a100.model_copy(update={"stack": profiles.MeasuredStack()})
    assert profiles.measured(here, other) and profiles.expected_error(here) is None


def test_errors_name_existing_profiles() -> None:
    read = profiles._errors()
    assert set(read["measured"]) <= set(profile_names("hardware"))
    assert {stack for stacks in read["measured"].values() for stack in stacks} <= set(profile_names("stacks"))
    assert set(read["error"]) <= set(profiles.ACCELERATORS_BY_NAME)


def test_tensors_move_no_faster_than_the_link_and_the_drives() -> None:
    h100 = profiles.hardware("h100")
    link, drives = 64e9 * h100.attained.link, h100.node.drives
    assert h100.store_rates("host") == (link, link)
    assert h100.store_rates("nvme") == (drives.write, drives.read)  # as many drives as devices
    fast = drives.model_copy(update={"write": 1e12, "count": 16})
    more = h100.model_copy(update={"node": h100.node.model_copy(update={"drives": fast})})
    assert more.store_rates("nvme") == (link, 2 * drives.read)
    assert h100.store_rates("device") == (math.inf, math.inf)
