"""A library with the interface of CUDA's driver that shows GPUs which are not there."""

from __future__ import annotations

import subprocess
from pathlib import Path

from helpers.cuda_emulation import compiler

from streamllm.machine import CUDA_DRIVER, Gpu

_SOURCE = """
#include <stddef.h>
#include <string.h>
struct gpu { const char* name; int major, minor; size_t memory; };
static const struct gpu gpus[] = { %(gpus)s {"", 0, 0, 0} };
int cuInit(unsigned flags) { return %(status)d; }
int cuDriverGetVersion(int* version) { *version = %(version)d; return 0; }
int cuDeviceGetCount(int* count) { *count = %(count)d; return 0; }
int cuDeviceGet(int* device, int index) { *device = 100 + index; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  strncpy(name, gpus[device - 100].name, size);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = gpus[device - 100].memory; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? gpus[device - 100].major : attribute == 76 ? gpus[device - 100].minor : -1;
  return 0;
}
"""


def build_driver(folder: Path, *gpus: Gpu, version: tuple[int, int] = (13, 0), status: int = 0) -> Path:
    """
    Args:
        folder: where the library comes to lie, by the driver's name (for ``LD_LIBRARY_PATH``).
        version: the newest CUDA that it supports.
        status: what ``cuInit`` returns; 0 for success.
    """
    rows = "".join(
        f'{{"{gpu.name}", {gpu.compute_capability[0]}, {gpu.compute_capability[1]}, {gpu.memory}ull}}, '
        for gpu in gpus
    )
    number = version[0] * 1000 + version[1] * 10
    source = _SOURCE % {"gpus": rows, "count": len(gpus), "version": number, "status": status}
    library = folder / CUDA_DRIVER
    command = [compiler(), "-x", "c", "-shared", "-fPIC", "-w", "-o", str(library), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return library
