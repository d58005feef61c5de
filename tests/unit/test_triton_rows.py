"""Every Triton row, conversion and constant against its reference, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jitgen.codegen import triton as dialect
from jitgen.ir.ops import COMPUTE_DTYPES, OPS
from jitgen.spec import DTYPES
from tests import triton_rows
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_rows") as process:
        yield process


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.quick(where=lambda dtype: dtype in ("float32", "int32", "uint8", "bool"))
def test_rows(dtype: str, failures: Interpreter) -> None:
    assert failures[f"rows-{dtype}"] == []


@pytest.mark.parametrize("storage", triton_rows.FLOAT_STORAGES)
@pytest.mark.quick(where=lambda storage: storage in ("bfloat16", "float8_e4m3fn"))
def test_storage_conversions(storage: str, failures: Interpreter) -> None:
    assert failures[f"storage-{storage}"] == []


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_casts_and_constants(dtype: str, failures: Interpreter) -> None:
    assert failures[f"casts-{dtype}"] == []


def test_scalars_have_the_types_of_the_signature(failures: Interpreter) -> None:
    assert failures["scalars"] == []


def test_every_operation_has_a_row_for_its_whole_domain() -> None:
    assert set(dialect.ROWS) == set(OPS)
    for op in OPS.values():
        for dtype in op.domain:
            assert triton_rows.row(op.name, dtype)


def test_tables_cover_every_dtype() -> None:
    assert set(dialect.TYPES) == set(COMPUTE_DTYPES)
    assert set(dialect.STORAGE_TYPES) == set(DTYPES)
    assert set(dialect.SIGNATURE_TYPES) == set(DTYPES)
