"""How the wgmma mainloop decodes formats in bit planes: every fragment of a weight, by the header on the host, against
the dequantised weight rounded once to the dtype of x."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.quant.formats import FORMATS, find
from tests.compile.test_formats_on_host import host_headers
from tests.cuda_on_host import on_host
from tests.gemm_numeric import operands

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

VARIED = ("uint3.floatzeros", "uint8.float16.floatzeros", "int4.float16", "int8.bfloat16", "fp8_e4m3.rows128")
QUICK = {("nvfp4", torch.bfloat16), ("mxfp4", torch.bfloat16), ("uint8", torch.bfloat16), ("int3", torch.float16)}
_TEXT = """
#include <jitgen/gemm_wgmma_planes.cuh>
using Index = int32_t;
using Weight = {weight};

// One thread writes every fragment: the numbers of each tile of 16 rows by 16 k's, as a warp's lanes have them.
struct Params {{
  {parameters};
}};

extern "C" __global__ void
decode(const __grid_constant__ Params params) {{
  const auto [codes, scales, zeros, out, shrunk, tiles, chunks] = params;
  *shrunk = jitgen::Decode<Weight>::shrunk;
  const Weight weight = {{codes, scales, zeros, nullptr}};
  const int groups = Weight::groups(chunks), unit = Weight::group ? Weight::group : 1 << 30;
  for (int tile = 0; tile < tiles; ++tile) {{
    for (int step = 0; step < chunks * 4; ++step) {{
      for (int lane = 0; lane < 32; ++lane) {{
        Weight::Codes read;
        read.read(codes + (tile * chunks + step / 4) * (32 * Weight::bits), lane, [](const auto* at) {{ return *at; }});
        Weight::Scales numbers;
        const int at = (tile * groups + step * 16 / unit) * 16 + lane / 4 * 2;
        numbers.scale[0] = *reinterpret_cast<const Weight::ScalePair*>(scales + at);
        if (Weight::zero_points) numbers.zero[0] = *reinterpret_cast<const Weight::ZeroPair*>(zeros + at);
        jitgen::Decode<Weight> decode;
        decode.set(numbers);
        uint32_t a[4];
        decode.fragment(a, read, step % 4);
        for (int i = 0; i < 8; ++i) {{
          const int row = tile * 16 + lane / 4 + i / 2 % 2 * 8, k = step * 16 + lane % 4 * 2 + i % 2 + i / 4 * 8;
          out[row * chunks * 64 + k] = uint16_t(a[i / 2] >> (i % 2 * 16));
        }}
      }}
    }}
  }}
}}
"""


_PARAMETERS = (
    *("const uint32_t* codes", "const Weight::Scale* scales", "const Weight::Zero* zeros", "uint16_t* out"),
    *("float* shrunk", "Index tiles", "Index chunks"),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", [*(name for name, row in FORMATS.items() if not row.tiled), *VARIED])
@pytest.mark.quick(where=lambda format, dtype: (format, dtype) in QUICK)
def test_every_fragment(format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(sum(map(ord, format)))
    row = find(format)
    group = row.group_size or (32, 64, 128)[len(format) % 3]
    x, dense = operands(512, 45, 256, dtype)
    dense[0], dense[1], dense[2, 7] = 0, 0.01, 100  # rows of zeros, of one number, and with an outlier
    dense[3] *= 1e-30 if dtype == torch.bfloat16 else 1e-6  # and of numbers that are subnormal, or nearly
    if dtype == torch.bfloat16:
        dense[4] *= 2.0**17  # of scales as large as all kernels have them
    w = jitgen.quantize(dense, format, group)
    lowered = jitgen.jit(lambda x, w: F.linear(x, w)).lower(x, w, backend="cuda", target="sm_90a")
    source, _ = lowered._lowered.render(0)
    found = re.search(r"using Weight = (jitgen::PlaneWeight<.*>);", source.text)
    assert found is not None, source.text
    assert "gemm_wgmma_quantized" in source.text
    text = _TEXT.format(weight=found[1], parameters=";\n  ".join(_PARAMETERS))
    decode = on_host(SimpleNamespace(name="decode", text=text, headers=source.headers), tmp_path, host_headers())
    tensors = dict(zip(row.tensor_names, w.with_layout("mma").tensors, strict=True))
    tiles, chunks = tensors["codes"].shape[:2]
    out = torch.zeros(tiles * 16, chunks * 64, dtype=dtype)
    addresses = [tensors[name].data_ptr() if name in tensors else 0 for name in ("codes", "scales", "zeros")]
    shrunk = torch.zeros(1)
    decode(1, 1, struct.pack("5Q2i", *addresses, out.data_ptr(), shrunk.data_ptr(), tiles, chunks))
    exact = w.dequantize(torch.float64)
    if row.tensor_scale:
        exact = exact / tensors["tensor_scale"][0, 0].double()
    weights = out[:45, :256].double() * shrunk.double()
    # One rounding to dtype, with what the two halves of a float32 scale leave out; one more of values of a table that
    # dtype does not have; and subnormal numbers.
    info = torch.finfo(dtype)
    rounded_values = not row.is_exact_in(str(dtype).removeprefix("torch.")) and row.zeros != "float"
    unit = info.eps / 2 * (1 + 2**-7 + rounded_values)
    assert ((weights - exact).abs() <= unit * exact.abs() + info.smallest_normal * info.eps).all()
