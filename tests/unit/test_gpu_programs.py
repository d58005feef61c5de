"""``make gpu-random``: what it makes of programs that are right, wrong, or that end or block their process."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import jitgen
from tests import program_gradients, programs
from tests.program_gradients import _exact_gradients, _Rounded, gradient_verdict
from tests.programs import Program, draw, verdict
from tools import gpu_programs
from tools.processes import Job

TEXT = """def program(x0, x1):
    v2 = torch.sin(x0)
    v3 = v2.sum(0)
    v4 = v3 * x1
    return v4
"""


def program(text: str = TEXT) -> Program:
    generator = torch.Generator().manual_seed(0)
    made = [torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (4,))]
    return Program(text, made, {torch.float64})


def test_a_seed_is_a_program() -> None:
    one, other = (draw(random.Random(seed).choice) for seed in (7, 7))
    assert repr(one) == repr(other)
    assert all(torch.equal(a, b) for a, b in zip(one.arguments, other.arguments, strict=True))


def test_gradients_that_are_right() -> None:
    made = program()
    assert gradient_verdict(made, made.function()) == ("right", "")
    assert gradient_verdict(made, jitgen.jit(made.function())) == ("right", "")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("v3 = v2.sum(0) * (1 + 1e-10)", "gradient 0: 12 of 12 off"),
        ("v3 = (v2.detach() - torch.sin(x0) + torch.sin(x0)).sum(0)", "gradient 0: 12 of 12 off"),
        ("v3 = torch.cat([v2[:2], v2[2:].detach()]).sum(0)", "gradient 0: 4 of 12 off"),
        ("v3 = v2.detach().sum(0)", "gradient 0 is None, eager torch's is not"),
    ],
)
def test_gradients_that_are_wrong(line: str, found: str) -> None:
    kind, told = gradient_verdict(program(), program(TEXT.replace("v3 = v2.sum(0)", line)).function())
    assert kind == "wrong"
    assert told.startswith(found)


def test_programs_without_gradients() -> None:
    assert gradient_verdict(made := program(TEXT.replace("v3 * x1", "v3 > x1")), made.function())[0] == "none"
    text = TEXT.replace("sin(x0)", "sin(x0.detach())").replace("* x1", "* x1.detach()")
    assert gradient_verdict(made := program(text), made.function())[0] == "none"


def test_gradients_of_programs_that_update_an_argument() -> None:
    made = program(TEXT.replace("torch.sin(x0)", "x0.mul_(2)"))
    assert gradient_verdict(made, made.function()) == ("right", "")
    twice = program(TEXT.replace("torch.sin(x0)", "x0.mul_(2) * 2"))
    assert gradient_verdict(made, twice.function())[0] == "wrong"


def test_integers_that_an_update_makes_require_a_gradient_have_none() -> None:
    """``fill_`` of a floating number marks an integer tensor so in eager torch."""
    text = "def program(x0, x1):\n    v2 = x1.fill_(x0.amax())\n    return x0 * 2\n"
    made = Program(text, [torch.rand(3, generator=torch.Generator().manual_seed(0)), torch.ones(2).long()])
    assert gradient_verdict(made, made.function()) == ("right", "")


NORMAL = """def program(x0, x1):
    v2 = F.layer_norm(x0, x0.shape[-1:])
    v3 = F.rms_norm(x0, x0.shape[-1:], eps=1e-3)
    v4 = F.group_norm(x0, 1)
    v5 = F.cosine_similarity(x0, x1, 1)
    return v2, v3, v4, v5
"""


@pytest.mark.parametrize("shape", [(3, 4), (3, 1)])
def test_normalizations_run_as_their_parts(shape: tuple[int, ...]) -> None:
    """The parts, without roundings, give what torch gives; the gradient of a row of one element is 0 but for eps."""
    made = Program(NORMAL, [torch.rand(shape, dtype=torch.float64) + 0.5 for _ in range(2)], {torch.float64})
    exact = made.exact_function()
    parts = _exact_gradients(made, exact, _Rounded(0.0, torch.Generator()))
    for got, want in zip(parts, _exact_gradients(made, exact), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert gradient_verdict(made, jitgen.jit(made.function())) == ("right", "")


@pytest.mark.parametrize("line", ["v2 = F.layer_norm(x0, x0.shape[-1:])", "v5 = F.cosine_similarity(x0, x1, 1)"])
def test_wrong_gradients_of_normalizations(line: str) -> None:
    made = program(NORMAL)
    made.arguments[1] = made.arguments[1].expand(3, 4)
    assert gradient_verdict(made, program(NORMAL.replace(line, f"{line} * (1 + 1e-9)")).function())[0] == "wrong"


def test_a_gradient_that_cancels_is_as_far_off_as_its_terms_are_rounded() -> None:
    """The gradient of a factor of a normalized row is 0 but for eps: a sum of terms 1e5 times as large."""
    text = "def program(x0, x1):\n    v2 = x1 * x0.cumprod(0)\n    return F.layer_norm(v2, v2.shape[-1:])\n"
    made = Program(text, [torch.tensor([1, 7, 1]), torch.tensor([[0.2896]])], {torch.float32})
    assert gradient_verdict(made, jitgen.jit(made.function())) == ("right", "")
    wrong = Program(text.replace("[-1:])", "[-1:]) + 1e-3 * (x1 - x1.detach())"), [])
    assert gradient_verdict(made, wrong.function())[0] == "wrong"


def test_no_gradient_is_zero_times_an_infinite_derivative() -> None:
    """``zero_`` ends the gradient of the variance of one element, which is NaN in eager torch."""
    text = "def program(x0, x1):\n    v2 = x0[:, :1].var(1)\n    v3 = v2.zero_()\n    return v2 + x1.sum()\n"
    made = program(text)
    assert gradient_verdict(made, jitgen.jit(made.function())) == ("right", "")


def test_a_conversion_that_copies_copies_in_the_exact_program_too() -> None:
    """``double()`` of float32 is new memory, which ``zero_`` then fills; of float64 it is the tensor itself."""
    text = "def program(x0):\n    v1 = x0 * 2\n    v2 = v1.double()\n    v3 = v2.zero_()\n    return v1\n"
    x = torch.rand(3, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        made = Program(text, [x.to(dtype)], {dtype})
        want = x.to(dtype) * 2 if dtype == torch.float32 else torch.zeros(3)
        assert torch.equal(made.run_exactly(made.exact_function())[0], want.double())
        assert verdict(made, made.function()) == ("right", "")


def test_what_eager_torch_lacks_on_the_device_is_judged_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made, run, calls = program(), Program.run, []

    def lacking(self: Program, function: Any) -> list[Any]:
        calls.append(self)
        if self is made and len(calls) == 1:
            raise NotImplementedError("\"addmm_cuda\" not implemented for 'Long'")
        return run(self, function)

    monkeypatch.setattr(Program, "run", lacking)
    assert verdict(made, made.function()) == ("right", "")
    assert calls[0] is made
    assert calls[1] is not made
    calls.clear()
    assert verdict(made, program(TEXT.replace("* x1", "* x1 * 2")).function())[0] == "wrong"
    calls.clear()
    assert gradient_verdict(made, made.function()) == ("right", "")


def test_another_error_is_a_crash() -> None:
    def broken(*arguments: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error")

    assert gradient_verdict(program(), broken) == ("crash", "RuntimeError: CUDA error")


def test_a_statement_that_others_need_stays() -> None:
    made = program(TEXT.replace("return v4", "return v4, v3").replace("    return", "    v5 = x0 + 1\n    return"))
    assert [made.without(number) is None for number in range(4)] == [True, True, False, False]
    shorter = made.without(2)
    assert shorter is not None
    assert shorter.text.splitlines()[-2:] == ["    v5 = x0 + 1", "    return v3"]


# ----------------------------------------------------------------------------------------------------- over processes

SCRIPT = """
import json, os, sys, time
for seed in map(int, sys.argv[1].split(",")):
    print(json.dumps({"seed": seed, "check": "results", "text": f"program {seed}"}), flush=True)
    if seed == 3:
        time.sleep(1000)
    if seed == 6:
        os._exit(139)
    kind = {"kind": "wrong", "found": "off", "program": "text"} if seed == 8 else {"kind": "right"}
    print("a warning of a library", json.dumps({"seed": seed, "check": "results", **kind}), sep="\\n", flush=True)
"""


def test_programs_that_hang_or_end_their_process_are_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(backend: str, device: str, checks: Any, seeds: Any) -> Job:
        return Job(backend, (sys.executable, "-c", SCRIPT, ",".join(map(str, seeds))), 2.0)

    monkeypatch.setattr(gpu_programs, "job", job)
    rows = list(gpu_programs.run("cuda", "cpu", ["results"], range(12), 2, time.monotonic() + 60))
    kinds = {row["seed"]: row["kind"] for row in rows}
    assert kinds == dict.fromkeys(range(12), "right") | {3: "hang", 6: "crash", 8: "wrong"}
    assert len(rows) == 12
    found = gpu_programs.summary("cuda", "results", range(12), rows)
    assert (found["programs"], found["left_out"], found["right"]) == (12, 0, 9)
    assert [row["seed"] for row in found["failures"]] == [3, 6, 8]
    assert found["failures"][0]["program"] == "program 3"


def test_a_whole_process_of_programs() -> None:
    rows = list(gpu_programs.run("cpp", "cpu", ["results", "gradients"], [0], 1, time.monotonic() + 100))
    assert {(row["seed"], row["check"]) for row in rows} == {(0, "results"), (0, "gradients")}
    assert {row["kind"] for row in rows} <= {"right", "refused", "none"}


@pytest.mark.slow
def test_a_whole_process_of_mixtures() -> None:
    rows = list(gpu_programs.run("cpp", "cpu", gpu_programs.ROUTING_CHECKS, [3], 1, time.monotonic() + 100))
    assert [(row["check"], row["kind"]) for row in rows] == [(check, "right") for check in gpu_programs.ROUTING_CHECKS]


def test_a_record_takes_the_runs_of_the_same_code(tmp_path: Path) -> None:
    path = tmp_path / "device-programs-h100.json"
    record = {"gpu_code_digest": "a", "runs": [{"first_seed": 0}]}
    assert gpu_programs.merged(record, path) == record
    path.write_text(json.dumps(record))
    more = {"gpu_code_digest": "a", "runs": [{"first_seed": 2000}]}
    assert gpu_programs.merged(more, path)["runs"] == [{"first_seed": 0}, {"first_seed": 2000}]
    assert gpu_programs.merged(more | {"gpu_code_digest": "b"}, path)["runs"] == [{"first_seed": 2000}]


def test_operations_whose_gradients_jump() -> None:
    """A program without any of them has no unclear gradient."""
    assert not program_gradients.KINKS.search(TEXT)
    assert program_gradients.KINKS.search("v1 = x0.amax(0)")
    assert set(programs.FLOATS) == {"f64", "f32", "f16", "bf16"}
