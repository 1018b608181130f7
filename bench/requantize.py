"""Writes a GGUF file with its weights in another quantization. Runs in .venv-llama-cpp.

python -m bench.requantize SOURCE TARGET QUANTIZATION

The source's quantized weights are dequantized, and the new ones are of these numbers. Other tensors, and all that describes the
model, are copied.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
from gguf.quants import dequantize, quantize

_PLAIN = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)
_OF_THE_FILE = ("general.architecture", "general.file_type")
"""Fields that the writer sets itself."""


def requantize(source: Path, target: Path, quantization: str) -> None:
    """Write `target`."""
    kind = gguf.GGMLQuantizationType[quantization]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantization}"])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _OF_THE_FILE:
            continue
        value_type = field.types[0]
        writer.add_key_value(name, field.contents(), value_type, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if tensor.tensor_type in _PLAIN:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, quantize(dequantize(tensor.data, tensor.tensor_type), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("quantization", help="as gguf names it, such as Q8_0")
    arguments = parser.parse_args()
    requantize(arguments.source, arguments.target, arguments.quantization)


if __name__ == "__main__":
    main()
