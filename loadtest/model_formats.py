"""The comparison's model in its peers' formats, each made from the GGUF file on first use and then kept."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from servers import EngineFailure, last_lines


class ModelFormats:
    """The same weights as the peers read them.

    Args:
        gguf: the model's own file.
        folder: where the others are kept; exists.
        llama_quantize: llama.cpp's quantiser, which writes the GGUF files; beside its server.
        transformers_python: a Python with torch, Transformers and streamllm, which writes the folder.

    Attributes:
        precision: what most of the matrices in the file are, as its file type says: ``Q4_1``.
    """

    def __init__(self, gguf: Path, folder: Path, llama_quantize: str, transformers_python: str) -> None:
        self.precision = file_type(gguf)
        self._gguf = gguf
        self._folder = folder
        self._llama_quantize = llama_quantize
        self._python = transformers_python

    def original(self) -> Path:
        """The model's own file."""
        return self._gguf

    def q4_0(self) -> Path:
        """As Q4_0, which llama.cpp has its fastest kernels for."""
        return self._requantised("Q4_0")

    def q8_0(self) -> Path:
        """As Q8_0: 8-bit integers in groups of 32."""
        return self._requantised("Q8_0")

    def f16(self) -> Path:
        """Dequantised, rounded to float16."""
        return self._requantised("F16")

    def folder(self) -> Path:
        """Dequantised to float32, as a folder of Hugging Face's; without an end-of-sequence token, for
        servers that know no ``ignore_eos``."""
        path = self._folder / f"{self._gguf.stem}-float32"
        if not path.exists():
            self._make([self._python, __file__, str(self._gguf), str(path)], path)
        return path

    def _requantised(self, kind: str) -> Path:
        path = self._folder / f"{self._gguf.stem}-as-{kind}.gguf"
        if not path.exists():
            if shutil.which(self._llama_quantize) is None:
                raise EngineFailure(
                    f"its {kind} file is made by llama.cpp's llama-quantize, which is not there "
                    "(loadtest/README.md tells how to build it; it is looked for beside --llama-server)"
                )
            partial = path.with_suffix(".partial")
            self._make(
                [self._llama_quantize, "--allow-requantize", str(self._gguf), str(partial), kind], partial
            )
            partial.rename(path)
        return path

    def _make(self, command: Sequence[str], path: Path) -> None:
        log = self._folder / f"{path.name}.log"
        with log.open("w") as output:
            done = subprocess.run(command, stdout=output, stderr=output)
        if done.returncode != 0:
            raise EngineFailure(f"{path.name} could not be made:\n{last_lines(log)}")


def file_type(gguf: Path) -> str:
    """A GGUF file's type without its size: ``Q4_1``, ``Q4_K``, ``F16``."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(gguf).get_field("general.file_type")
    if field is None:
        return gguf.stem.rsplit(".", 1)[-1].upper()
    name = LlamaFileType(int(field.contents())).name
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def write_folder(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a float32 folder of Hugging Face's, or nothing at all if that fails."""
    from compare_transformers import load_transformers
    from transformers import AutoTokenizer

    from streamllm.sources.resolve import resolve

    partial = folder.with_name(f"{folder.name}.partial")
    model = load_transformers(resolve(str(gguf)))
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    for name in ("config.json", "generation_config.json"):
        path = partial / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, "eos_token_id": None}, indent=2))
    partial.rename(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="loadtest/model_formats.py", allow_abbrev=False)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    write_folder(args.gguf, args.folder)


if __name__ == "__main__":
    main()
