"""The wgmma mainloops compiled without a device: their instructions, their resources, what the assembler says."""

from __future__ import annotations

import re

import pytest
from wgmma_kernels import DENSE, QUANTIZED, Dense, Quantized

from jitgen.compilers import disassemble, nvrtc

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")


FEW = (QUANTIZED[0], QUANTIZED[17], DENSE[4])
MORE = [pytest.param(config, marks=pytest.mark.slow) for config in [*QUANTIZED, *DENSE] if config not in FEW]


@pytest.mark.parametrize("config", [*FEW, *MORE], ids=repr)
def test_nothing_spills_and_nothing_is_serialised(config: Quantized | Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[str] = []
    parse = nvrtc.parse_resources

    def kept(log: str, name: str) -> dict[str, int]:
        logs.append(log)
        return parse(log, name)

    monkeypatch.setattr(nvrtc, "parse_resources", kept)
    artifact = nvrtc.compile(config.source())
    # C7510 and C7512: wgmmas that the assembler has to serialise; C7508: a setmaxnreg it ignores.
    assert not re.search(r"C75\d\d|warning", logs[0]), logs[0]
    assert artifact.meta["spill_bytes"] == artifact.meta["stack_bytes"] == 0
    assert config.shared_bytes <= 227 * 1024
    if disassemble.find_tool() is not None:
        code = disassemble.sass(artifact.files["kernel.cubin"])
        assert len(re.findall(r"\bHGMMA\b", code)) == config.wgmmas
        assert "UTMALDG" in code
