from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from streamllm import _native, machine
from streamllm.cli import collect_env
from streamllm.cli.main import main
from streamllm.errors import ConfigError
from streamllm.models.registry import supported_architectures
from streamllm.ops import instruction_set
from streamllm.ops.gpu import dispatch
from streamllm.ops.gpu.dispatch import KernelChoice


def report(capsys) -> dict[str, dict]:
    assert main(["collect-env", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_says_what_runs_here_and_why(capsys):
    sections = report(capsys)
    kernels = sections["kernels"]
    assert kernels["instruction sets"] == _native.instruction_sets()
    assert kernels["in use"].startswith(f"{_native.instruction_set()}: ")
    assert kernels["native module"] == _native.__file__
    assert kernels["threads"].startswith(f"{machine.available_cores()}: ")
    assert set(_native.weight_formats()) < set(sections["weight formats"])
    assert sections["KV cache"] == {"--dtype auto": "float16", "--dtype float32": "float32"}
    assert sections["models"]["as native plans"] == supported_architectures()
    assert sections["packages"]["numpy"]


def test_a_machine_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(machine, "gpus", list)
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: None)
    gpu = report(capsys)["GPU"]
    assert gpu["GPUs"] == "none that CUDA's driver shows"
    assert gpu["CUDA of the driver"] == "no driver that works"


def test_a_machine_with_gpus(capsys, monkeypatch):
    h200 = machine.Gpu("NVIDIA H200", (9, 0), 141 * 2**30)
    monkeypatch.setattr(machine, "gpus", lambda: [h200, h200])
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: (13, 0))
    choice = KernelChoice("triton", "CUDA kernels are not used: they were not built")
    monkeypatch.setattr(dispatch, "kernel_choice", lambda: choice)
    monkeypatch.setattr(collect_env, "_version", {"torch": "2.13.0", "triton": "3.9.0"}.get)
    monkeypatch.setattr(machine, "has_cuda_torch", lambda: True)
    gpu = report(capsys)["GPU"]
    assert gpu["GPUs"] == ["NVIDIA H200 (sm_90, 141.00 GiB)"] * 2
    assert gpu["CUDA of the driver"] == "13.0"
    assert gpu["extra gpu"] == "installed"
    assert gpu["GPU kernels"] == "triton: CUDA kernels are not used: they were not built"


def test_what_a_gpu_lacks_is_said(capsys, monkeypatch):
    def refuse():
        raise ConfigError("Triton is not installed: pip install 'streamllm[gpu]' installs it.")

    monkeypatch.setattr(dispatch, "kernel_choice", refuse)
    monkeypatch.setattr(collect_env, "_version", {"torch": "2.13.0+cpu"}.get)
    gpu = report(capsys)["GPU"]
    assert gpu["GPU kernels"] == "none: Triton is not installed: pip install 'streamllm[gpu]' installs it."
    assert gpu["extra gpu"] == "not installed (triton missing): pip install 'streamllm[gpu]'"
    monkeypatch.setattr(collect_env, "_version", {"torch": "2.13.0+cpu", "triton": "3.9.0"}.get)
    monkeypatch.setattr(machine, "has_cuda_torch", lambda: False)
    assert report(capsys)["GPU"]["extra gpu"] == "torch 2.13.0+cpu is a build for CPUs"


def test_text_and_json_say_the_same(capsys):
    sections = report(capsys)
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for title, section in sections.items():
        assert f"{title}\n" in text
        for name, value in section.items():
            if name == "memory available":  # changes from one moment to the next
                continue
            shown = ", ".join(value) if isinstance(value, list) else "none" if value is None else str(value)
            assert any(
                line.split("  ", 2)[1] == name and line.endswith(shown)
                for line in text.splitlines()
                if line.startswith("  ")
            )


def test_a_choice_by_hand_and_a_slow_cpu_are_explained(monkeypatch):
    supported = _native.instruction_sets()
    before = _native.instruction_set()
    try:
        _native.set_instruction_set("portable")
        assert supported == ["portable"] or supported[0] in instruction_set.instruction_set().why
    finally:
        _native.set_instruction_set(before)
    monkeypatch.setattr(instruction_set, "cpu_flags", lambda: frozenset({"sse2", "fma"}))
    assert instruction_set._why("portable", ("portable",)) == "this CPU lacks avx2, f16c; slow"


@pytest.mark.parametrize("name", _native.instruction_sets())
def test_every_instruction_set_says_how_it_multiplies(name):
    kernels = instruction_set.weight_kernels(name)
    assert list(kernels) == _native.weight_formats()
    assert ("vpdpbusd" in kernels["q4_1"]) == name.endswith("_vnni")
    assert "8 bits" in kernels["q8_0"] and "float32" in kernels["bfloat16"]


def test_without_the_native_module_it_says_so(monkeypatch):
    def missing():
        raise ImportError("No module named 'streamllm._native'")

    monkeypatch.setattr(instruction_set, "native_module", missing)
    sections = collect_env.collect()
    assert "not built" in sections["kernels"]["native module"]
    assert "pip install" in sections["kernels"]["native module"]
    assert "not built" in collect_env.render(sections).split("weight formats")[1]


def test_it_starts_without_torch():
    check = (
        "import sys; from streamllm.cli.main import main; main(['collect-env']); "
        "assert not {'torch', 'transformers', 'starlette', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL, env=os.environ)


def test_an_unknown_flag_is_one_line(capsys):
    assert main(["collect-env", "--yaml"]) == 2
    assert capsys.readouterr().err == "streamllm: error: unrecognized arguments: --yaml\n"
