"""That the structs which Python fills are those that the CUDA kernels read: each field where the compiler has
it."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.cuda_emulation import SOURCES, compiler

from streamllm.ops.gpu.cuda.attention import PagedDecodeArgs
from streamllm.ops.gpu.cuda.elementwise import ActAndMulArgs, CopyBlocksArgs, RmsNormArgs, RotaryAndCacheArgs
from streamllm.ops.gpu.cuda.sampling import SampleArgs
from streamllm.ops.step_inputs import ROW_EDITS

Field = tuple[str, int, int]
"""Name, offset and size in bytes."""

STRUCTS = [
    ("attention_decode.cu", PagedDecodeArgs),
    ("elementwise.cu", RmsNormArgs),
    ("elementwise.cu", ActAndMulArgs),
    ("rotary_cache.cu", RotaryAndCacheArgs),
    ("copy_blocks.cu", CopyBlocksArgs),
    ("sampling.cu", SampleArgs),
]

pytestmark = pytest.mark.skipif(shutil.which(compiler()) is None, reason="no C++ compiler")


def as_compiled(source: str, name: str, folder: Path) -> tuple[int, list[Field]]:
    """Size and fields of a struct that a kernel's source defines."""
    found = re.search(
        rf"^struct {name} {{$.*?^}};$", (SOURCES / source).read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, f"{source} does not define {name}"
    declarations = re.findall(r"^\s*[\w:]+(?: \w+)*\s*\*?\s+([\w, ]+);", found[0], re.MULTILINE)
    names = [field.strip() for declaration in declarations for field in declaration.split(",")]
    lines = [f'std::printf("%zu\\n", sizeof({name}));']
    for field in names:
        member = f"{name}, {field}), sizeof({name}::{field})"
        lines.append(f'std::printf("{field} %zu %zu\\n", offsetof({member});')
    program = folder / "layout.cpp"
    program.write_text(
        "#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n"
        + found[0]
        + f"\nint main() {{\n{chr(10).join(lines)}\n}}\n"
    )
    binary = folder / "layout"
    subprocess.run([compiler(), "-std=c++17", str(program), "-o", str(binary)], check=True)
    size, *fields = subprocess.run([binary], capture_output=True, text=True, check=True).stdout.splitlines()
    split = (field.split() for field in fields)
    return int(size), [(field, int(offset), int(length)) for field, offset, length in split]


@pytest.mark.parametrize(("source", "struct"), STRUCTS, ids=lambda value: getattr(value, "__name__", None))
def test_arguments_lie_where_the_kernel_looks_for_them(source, struct, tmp_path):
    fields = [(name, getattr(struct, name)) for name, _ in struct._fields_]
    mirrored = [(name, field.offset, field.size) for name, field in fields]
    assert as_compiled(source, struct.__name__, tmp_path) == (ctypes.sizeof(struct), mirrored)


def test_edits_of_a_row_of_logits_lie_where_both_samplers_look_for_them(tmp_path):
    assert ROW_EDITS.fields is not None and ROW_EDITS.names is not None
    places = [(name, ROW_EDITS.fields[name]) for name in ROW_EDITS.names]
    mirrored = [(name, offset, np.dtype(dtype).itemsize) for name, (dtype, offset, *_) in places]
    assert as_compiled("../sampling_records.hpp", "RowEdits", tmp_path) == (ROW_EDITS.itemsize, mirrored)
