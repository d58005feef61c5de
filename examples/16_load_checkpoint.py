"""Checkpoints of other programs: a GPTQ, a GGUF and a compressed-tensors file are made here, loaded, run and compared.

Run:   python examples/16_load_checkpoint.py      (needs safetensors)
Shows: that a loaded weight has the numbers of the file, to the bit; the format that was chosen for each; a model filled
       from a file; what a damaged file says.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import jitgen

ROWS, COLUMNS, GROUP = 256, 512, 64
Tensor = torch.Tensor


def words(codes: Tensor) -> Tensor:
    """Rows of 4-bit codes in int32 words, the lowest bits first."""
    eights = codes.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return eights.sum(-1).to(torch.uint32).view(torch.int32)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15 around 8, a scale for each group, and the weight that they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half()
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).long() + 8
    dense = ((codes - 8).half() * scales.unsqueeze(-1)).flatten(1)
    return codes.flatten(1), scales, dense


def write_gptq(path: Path, weight: Tensor) -> Tensor:
    codes, scales, dense = quantized(weight)
    zeros = torch.full((COLUMNS // GROUP, ROWS), 7)  # the first version stores 8 as 7
    index = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    tensors = {"qweight": words(codes).t(), "qzeros": words(zeros), "scales": scales.t()}
    tensors = {f"up.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors | {"up.g_idx": index}, path)
    return dense


def write_compressed_tensors(path: Path, weight: Tensor) -> Tensor:
    codes, scales, dense = quantized(weight)
    shape = torch.tensor([ROWS, COLUMNS])
    save_file({"up.weight_packed": words(codes), "up.weight_scale": scales, "up.weight_shape": shape}, path)
    return dense


def write_gguf(path: Path, weight: Tensor) -> Tensor:
    """One tensor of type Q8_0: blocks of a float16 scale and 32 codes."""
    blocks = weight.view(-1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scales.float()).round().clamp(-127, 127).to(torch.int8)
    data = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], 1).numpy().tobytes()
    name = b"up.weight"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name
    head += struct.pack("<IQQIQ", 2, COLUMNS, ROWS, 8, 0)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return (codes.float() * scales.float()).view(ROWS, COLUMNS)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        show(Path(folder))


def show(folder: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS) / COLUMNS**0.5
    x = torch.randn(4, COLUMNS)
    files = {
        "gptq.safetensors": write_gptq,
        "compressed.safetensors": write_compressed_tensors,
        "q8_0.gguf": write_gguf,
    }
    for name, write in files.items():
        path = folder / name
        dense = write(path, weight)
        loaded = jitgen.load_quantized(path)["up.weight"]
        assert torch.equal(loaded.dequantize(dense.dtype), dense)
        error = (F.linear(x, loaded) - F.linear(x.double(), loaded.dequantize(torch.float64))).norm() / x.norm()
        print(
            f"{name:23s} is {loaded.format:13s} of {loaded.nbytes:7,} bytes, equal to the bit; "
            f"the product's error {error:.1e}"
        )
        assert error < 1e-5

    model = torch.nn.ModuleDict({"up": torch.nn.Linear(COLUMNS, ROWS, bias=False)})
    jitgen.load_quantized(folder / "gptq.safetensors", model=model)
    print(f"\na model filled from a file: {model['up'].weight!r}")

    file = folder / "q8_0.gguf"
    file.write_bytes(file.read_bytes()[:-1000])
    try:
        jitgen.load_quantized(file)
    except jitgen.FormatError as error:
        print(f"a truncated file: {error}")


if __name__ == "__main__":
    main()
