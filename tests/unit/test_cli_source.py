"""``jitgen source``: what it takes as function and arguments, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from jitgen import settings
from jitgen.cli.group import jitgen
from jitgen.cli.source import read_argument, read_arguments
from jitgen.compilers import host, nvrtc
from jitgen.errors import UnsupportedError
from jitgen.spec import TensorSpec

MODULE = """
import torch
import jitgen

def scaled(x, factor=1.0, cube=False):
    y = x * x * x if cube else x * x
    return y * factor

@jitgen.jit(backend="triton")
def decorated(x):
    return x.exp()

class Gate:
    @staticmethod
    def up(x, y):
        return torch.relu(x) * y

number = 3

if __name__ == "__main__":
    raise SystemExit("this is not run")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    path = tmp_path / "a_model.py"
    path.write_text(MODULE)
    return str(path)


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(jitgen, ["source", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_source_of_a_plain_function(module: str) -> None:
    text = run(f"{module}:scaled", "--target", "sm_90a", "--arg", "bf16[M,4096]", "--arg", "2.0").stdout
    assert "__global__" in text
    assert "bfloat16" in text
    assert "sm_90a" in text


@pytest.mark.parametrize(
    ("target", "backend", "expected"),
    [("gfx942", "triton", "tl.load"), ("sm_80", "cuda", "__global__"), ("x86-64-v3", "cpp", "int64_t")],
)
def test_every_dialect_without_its_device(module: str, target: str, backend: str, expected: str) -> None:
    assert expected in run(f"{module}:Gate.up", "--target", target, "--arg", "f32[M]", "--arg", "f32[M]").stdout
    facts = json.loads(run(f"{module}:Gate.up", "--target", target, *["--arg", "f32[M]"] * 2, "--json").stdout)
    assert facts["target"] == target
    assert [kernel["backend"] for kernel in facts["kernels"]] == [backend]
    assert "1 kernel" in facts["explanation"]
    assert len(facts["key"]) == 64


def test_arguments_by_name_and_static_ones(module: str) -> None:
    plain = run(f"{module}:scaled", "--arg", "f32[M]", "--arg", "factor=2.0").stdout
    cubed = run(f"{module}:scaled", "--arg", "f32[M]", "--arg", "factor=2.0", "--arg", "cube=true").stdout
    assert cubed.count(" * ") > plain.count(" * ")


def test_a_decorated_function_keeps_its_backend(module: str) -> None:
    assert "tl.load" in run(f"{module}:decorated", "--target", "sm_90a", "--arg", "f32[M]").stdout
    assert (
        "__global__" in run(f"{module}:decorated", "--target", "sm_90a", "--arg", "f32[M]", "--backend", "cuda").stdout
    )


def test_a_function_of_an_installed_module() -> None:
    assert "silu" in run("torch.nn.functional:silu", "--arg", "f16[M,N]", "--explain").stdout


def test_explain(module: str) -> None:
    text = run(f"{module}:scaled", "--arg", "bf16[M,4096]", "--explain").stdout
    assert "bytes moved" in text
    assert "#include" not in text


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_assembly_of_this_processor(module: str) -> None:
    assert "jitgen_elementwise_" in run(f"{module}:scaled", "--arg", "f32[M]", "--asm", "asm").stdout
    assert "it has" in run(f"{module}:scaled", "--arg", "f32[M]", "--asm", "ptx", code=2).stderr


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_ptx_without_a_gpu(module: str) -> None:
    arguments = [f"{module}:scaled", "--target", "sm_90a", "--arg", "f32[M]", "--asm", "ptx"]
    assert ".target sm_90a" in run(*arguments).stdout
    assert ".target sm_90a" in json.loads(run(*arguments, "--json").stdout)["asm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a_model.py"], "a colon and the function"),
        (["absent.py:f"], "no file absent.py"),
        (["no_such_module_here:f"], "cannot import no_such_module_here"),
        (["{module}:absent"], "has no 'absent'"),
        (["{module}:number"], "not a function"),
        (["{module}:scaled", "--arg", "[M,4096]"], "cannot read '[M,4096]'"),
        (["{module}:scaled", "--arg", "bf16[M,"], "cannot read"),
        (["{module}:scaled"], "missing a required argument: 'x'"),
        (["{module}:scaled", "--arg", "f32[M]", "--arg", "depth=3"], "unexpected keyword argument 'depth'"),
        (["{module}:decorated", "--arg", "f32[M]", "--arg", "1"], "too many positional arguments"),
        *(
            (["{module}:scaled", "--arg", "f32[M]", "--target", target], f"unknown target '{target}'")
            for target in ("sm_99", "sm_80a", "sm_90f", "sm_900", "gfx999")
        ),
    ],
)
def test_what_is_wrong_is_said(module: str, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(jitgen, ["source", *(part.format(module=module) for part in arguments)])
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert message in result.stderr


def test_a_setting_that_does_not_parse(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "x")
    assert (
        "expected a level"
        in run(f"{module}:scaled", "--arg", "f32[M]", "--target", "cpu", "--asm", "asm", code=1).stderr
    )
    doctor = CliRunner().invoke(jitgen, ["doctor"])
    assert doctor.exception is None or isinstance(doctor.exception, SystemExit)
    assert "expected a level" in doctor.output


def test_an_unknown_target_lists_the_known(module: str) -> None:
    assert "sm_90a" in run(f"{module}:scaled", "--target", "sm90", "--arg", "f32[M]", code=1).stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.0", 2.0),
        ("-3", -3),
        ("1e-5", 1e-5),
        ("true", True),
        ("False", False),
        ("none", None),
        ("'tanh'", "tanh"),
        ("(1, 2)", (1, 2)),
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        ("bf16[M,4096]", TensorSpec(("M", 4096), torch.bfloat16)),
        ("int8[]", TensorSpec((), torch.int8)),
    ],
)
def test_reading_an_argument(text: str, value: object) -> None:
    assert read_argument(text) == value
    assert type(read_argument(text)) is type(value)


@pytest.mark.parametrize("dtype", ["float32", None, float])
def test_a_spec_is_of_a_dtype_of_torch(dtype: object) -> None:
    with pytest.raises(UnsupportedError, match=r"is no torch\.dtype; pass one, such as torch\.float32"):
        TensorSpec(("M", 4), dtype)  # type: ignore[arg-type]


def test_named_arguments() -> None:
    assert read_arguments(("f32[M]", "approximate='tanh'", "scale = 2")) == (
        [TensorSpec(("M",), torch.float32)],
        {"approximate": "tanh", "scale": 2},
    )
