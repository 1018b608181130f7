"""Each worker gets a GPU of its own, and no other process sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.cli.commands.up import UpSettings
from kvpool.cli.launch.cluster import ClusterSpec
from kvpool.cli.launch.gpus import one_gpu_each, visible_gpus
from kvpool.client import InvalidRequest


def devices(folder: Path, count: int) -> Path:
    """A /dev with that many GPUs, and the files that come with them."""
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{index}" for index in range(count))):
        (folder / name).touch()
    return folder


def test_the_variable_goes_before_the_device_files(tmp_path: Path) -> None:
    folder = devices(tmp_path, 4)
    assert visible_gpus({}, folder) == ["0", "1", "2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}, folder) == ["2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, folder) == ["MIG-a", "MIG-b"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, folder) == []


def test_no_device_file_means_that_nobody_knows(tmp_path: Path) -> None:
    folder = devices(tmp_path, 0)
    assert visible_gpus({}, folder) is None
    assert one_gpu_each(2, {}, folder) == ["0", "1"]


def test_a_container_counts_from_zero(tmp_path: Path) -> None:
    """It was given the host's third GPU."""
    (tmp_path / "nvidia2").touch()
    assert one_gpu_each(1, {}, tmp_path) == ["0"]


def test_too_few_gpus_are_refused_with_the_figures(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"8 workers .* need 8 GPUs, there are 4: .* cuda:0"):
        one_gpu_each(8, {}, devices(tmp_path, 4))
    with pytest.raises(InvalidRequest, match=r"there are 1 \(CUDA_VISIBLE_DEVICES=7\)"):
        one_gpu_each(2, {"CUDA_VISIBLE_DEVICES": "7"}, tmp_path)


def test_workers_are_started_with_one_gpu_each() -> None:
    spec = ClusterSpec(num_workers=8, gpu_each=True, share_cores=False)
    manager, *workers = spec.children({"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"})
    assert "CUDA_VISIBLE_DEVICES" not in manager.environment
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers] == list("76543210")
    assert not any("OMP_NUM_THREADS" in worker.environment for worker in workers)


def test_up_knows_when_each_worker_needs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said so, or left to itself on a machine with GPUs; never if the workers are told elsewhere."""
    for name in ("KVPOOL_CONFIG", "KVPOOL_WORKER_DEVICE", "KVPOOL_UP_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for settings in (UpSettings(device="cuda", config=None), UpSettings(config=None)):
        spec = settings.spec()
        assert spec.gpu_each
        assert spec.worker_arguments == ("--device", "cuda:0")
    shared = UpSettings(device="cuda:1", config=None).spec()
    assert (shared.gpu_each, shared.worker_arguments) == (False, ("--device", "cuda:1"))
    monkeypatch.setenv("KVPOOL_WORKER_DEVICE", "cpu")
    assert (UpSettings(config=None).spec().gpu_each, UpSettings(config=None).spec().worker_arguments) == (False, ())
    monkeypatch.delenv("KVPOOL_WORKER_DEVICE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not UpSettings(config=None).spec().gpu_each


def test_a_worker_device_in_the_settings_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = tmp_path / "kvpool.toml"
    config.write_text('[worker]\ndevice = "cpu"\n')
    monkeypatch.setenv("KVPOOL_CONFIG", str(config))
    assert not UpSettings(config=None).spec().gpu_each
    config.write_text("[worker]\nnum_blocks = 9\n")
    assert UpSettings(config=None).spec().gpu_each
