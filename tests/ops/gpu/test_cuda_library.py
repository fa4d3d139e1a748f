"""Whether the compiled CUDA kernels are used, and what is said if not."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cuda_emulation import build, missing

from streamllm import machine
from streamllm.errors import ConfigError
from streamllm.machine import Gpu
from streamllm.ops.gpu import dispatch
from streamllm.ops.gpu.cuda import library
from streamllm.ops.gpu.cuda.library import CudaLibrary, CudaUnavailable

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 2**36)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes the package look as if it had been installed with these files, on a machine with H100s."""

    def place(*, files: dict[str, bytes], gpus=(H100,), driver=(13, 0)) -> Path:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(library, "_folders", lambda: [tmp_path])
        monkeypatch.setattr(machine, "gpus", lambda: list(gpus))
        monkeypatch.setattr(machine, "cuda_driver_version", lambda: driver)
        return tmp_path

    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    library.library.cache_clear()
    yield place
    library.library.cache_clear()


def built_for(*architectures: str):
    """A loaded library that says so of itself."""

    class Built(CudaLibrary):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.cuda_version, self.architectures = (13, 0), architectures

    return Built


@pytest.fixture(scope="module")
def emulated_file() -> bytes:
    if reason := missing():
        pytest.skip(reason)
    return build([]).path.read_bytes()


@pytest.mark.parametrize(
    ("architectures", "capability"),
    [
        (("90",), (9, 0)),
        (("90-real",), (9, 0)),
        (("80-real",), (8, 9)),
        (("80-real", "90"), (12, 0)),
        (("80-virtual",), (8, 0)),
    ],
)
def test_code_for_a_gpu(architectures, capability):
    library.check_architecture(architectures, capability)


@pytest.mark.parametrize(
    ("architectures", "capability"),
    [(("90-real",), (10, 0)), (("89",), (8, 6)), (("90-real", "100"), (8, 0)), (("90-virtual",), (8, 9))],
)
def test_no_code_for_a_gpu(architectures, capability):
    with pytest.raises(CudaUnavailable, match=r"built for sm_.* and the GPU is sm_\d+; reinstalling"):
        library.check_architecture(architectures, capability)


def test_a_driver_of_the_same_major_version_or_later_will_do():
    library.check_driver((13, 2), (13, 0))
    library.check_driver((12, 8), (13, 0))
    with pytest.raises(CudaUnavailable, match=r"with CUDA 13.0, and the driver supports CUDA 12.4 at most"):
        library.check_driver((13, 0), (12, 4))


def test_a_library_that_fits_is_used(install, emulated_file, monkeypatch):
    install(files={library.NAME: emulated_file})
    monkeypatch.setattr(library, "CudaLibrary", built_for("80-real", "90"))
    pytest.importorskip("triton")
    choice = dispatch.kernel_choice()
    assert choice.name == "cuda"
    triton_has = "prompts' attention and experts are Triton's"
    assert choice.why == f"libstreamllm_cuda.so was built for this GPU; {triton_has}"
    assert library.library() is library.library()


@pytest.mark.parametrize(
    ("architectures", "gpus", "driver", "why"),
    [
        (["80"], [], None, "there is no GPU that CUDA's driver knows"),
        (["80-real"], [H100], (13, 0), "they were built for sm_80, and the GPU is sm_90"),
        (
            ["90"],
            [H100],
            (12, 9),
            "they were built with CUDA 13.0, and the driver supports CUDA 12.9",
        ),
    ],
)
def test_a_library_that_does_not_fit_gives_way_to_triton(
    install, emulated_file, monkeypatch, architectures, gpus, driver, why
):
    install(files={library.NAME: emulated_file}, gpus=gpus, driver=driver)
    monkeypatch.setattr(library, "CudaLibrary", built_for(*architectures))
    pytest.importorskip("triton")
    choice = dispatch.kernel_choice()
    assert choice.name == "triton"
    assert choice.why.startswith(f"CUDA kernels are not used: {why}")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "they were not built$"),
        (
            {library.NOT_BUILT: b"no nvcc at install\n"},
            "they were not built: no nvcc at install$",
        ),
        ({library.NAME: b"not a library"}, "libstreamllm_cuda.so does not load: .*"),
    ],
)
def test_why_there_is_no_library(install, files, why):
    install(files=files)
    with pytest.raises(CudaUnavailable, match=why):
        library.library()


def test_the_environment_chooses(install, monkeypatch):
    install(files={})
    pytest.importorskip("triton")
    for name in ("triton", "reference"):
        monkeypatch.setenv(dispatch.VARIABLE, name)
        assert dispatch.kernel_choice() == dispatch.KernelChoice(name, "STREAMLLM_GPU_KERNELS asks for it")
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    with pytest.raises(ConfigError, match="asks for CUDA kernels, but they were not built; without it"):
        dispatch.kernel_choice()
    monkeypatch.setenv(dispatch.VARIABLE, "hip")
    with pytest.raises(ConfigError, match="must be one of cuda, triton, reference, not 'hip'"):
        dispatch.kernel_choice()


def test_without_triton_there_are_no_kernels(install, monkeypatch):
    install(files={})
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Triton is not installed: pip install 'streamllm\[gpu\]'"):
        dispatch.kernel_choice()


def test_triton_needs_a_c_compiler(install, monkeypatch):
    install(files={})
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="install gcc or clang, or set CC"):
        dispatch.kernel_choice()
    monkeypatch.setenv("CC", "zig cc")
    assert dispatch.kernel_choice().name == "triton"


def test_kernels_of_a_choice(install, monkeypatch):
    torch = pytest.importorskip("torch")
    install(files={})
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    chosen = dispatch.choose_kernels(torch.device("cpu"))
    assert chosen.kernels.name == chosen.choice.name == "reference"


def test_errors_have_the_texts_of_their_codes(emulated_file, tmp_path):
    (tmp_path / library.NAME).write_bytes(emulated_file)
    loaded = CudaLibrary(tmp_path / library.NAME)
    assert loaded.error_text(-1) == "no kernel for this dtype"
    assert loaded.error_text(9) == "invalid configuration argument"
