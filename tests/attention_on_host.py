"""Programs in C++ over the headers of CUDA attention kernels, whose warps are threads of the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

from jitgen._data import templates_directory

PTX = {
    'asm volatile("" : "+f"(sums[i])::"memory")': 'asm volatile("" : "+x"(sums[i])::"memory")',
    'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low))': (
        "pair = uint32_t(store<bfloat16>(high).bits) << 16 | store<bfloat16>(low).bits"
    ),
}


def run(main: str, folder: Path, family: str) -> None:
    """Compiles and runs ``main`` with the headers of ``family``, in which two pieces of PTX are C++."""
    (folder / "jitgen").mkdir()
    missing = set(PTX)
    folders = (templates_directory() / f"{name}/include/jitgen" for name in ("common", family))
    for header in (path for each in folders for path in each.glob("attention_*.cuh")):
        text = header.read_text()
        for ptx, plain in PTX.items():
            missing -= {ptx} if ptx in text else set()
            text = text.replace(ptx, plain)
        (folder / f"jitgen/{header.name}").write_text(text)
    assert not missing
    for name in ("register_deal", "types"):
        shared = templates_directory() / f"common/include/jitgen/{name}.cuh"
        (folder / f"jitgen/{name}.cuh").write_text(shared.read_text())
    for name in ("ptx", "wgmma_ptx"):
        (folder / f"jitgen/{name}.cuh").write_text((Path(__file__).parent / "host_warp.hpp").read_text())
    (folder / "main.cpp").write_text(main)
    command = ["g++", "-std=c++20", "-O1", "-w", "-pthread", f"-I{folder}", str(folder / "main.cpp")]
    done = subprocess.run([*command, "-o", str(folder / "main")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    done = subprocess.run([folder / "main"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
