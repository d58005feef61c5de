"""Records of what ran on a GPU: ``docs/measured/device-<kind>-<card>.json``.

Each has the commit, the digests of the GPU code (``tools/gpu_code.py``), the card, its driver and the versions, and
what the tool that writes it adds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import gpu_code

DIRECTORY = gpu_code.CHECKOUT / "docs" / "measured"
FACTS_SECONDS = 120.0
"""A card that does not answer for so long is not waited for."""
_CARD = re.compile(r"\b(?:[ABHLTV]\d{1,3}[A-Z]?|RTX \w+)\b")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every tool has which writes a record."""
    directory = os.environ.get("DEVICE_TESTS_DIR") or None
    parser.add_argument("--directory", type=Path, default=directory, help="of the record; default: docs/measured")
    commit = os.environ.get("DEVICE_TESTS_COMMIT") or None
    parser.add_argument("--commit", default=commit, help="for the record, where there is no git")


def card_of(name: str) -> str:
    """The short name of a card: ``h100`` for ``NVIDIA H100 80GB HBM3``."""
    found = _CARD.search(name)
    return re.sub(r"[^a-z0-9]+", "-", (found[0] if found else name).lower()).strip("-")


def facts(commit: str | None = None) -> dict[str, Any]:
    """The commit, GPU code, card and versions. The card is asked by a process of its own, which may not return."""
    command = [sys.executable, "-c", "from tools import device_record; device_record.print_versions()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(gpu_code.CHECKOUT), *sys.path])}
    try:
        asked = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=FACTS_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        sys.exit(
            f"the card has not answered for {FACTS_SECONDS:.0f} s: a process may hang on it (nvidia-smi lists them)"
        )
    except subprocess.CalledProcessError as error:
        sys.exit(f"the card cannot be asked for its name: exit status {error.returncode}, and the reason is above")
    versions: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    found = gpu_code.digests()
    versions["commit"] = commit or versions["commit"]
    return versions | {"gpu_code_digest": gpu_code.tree(found), "gpu_code": found}


def print_versions() -> None:
    """Print the commit, the card and the versions as JSON."""
    import torch

    from bench import measurement

    found: dict[str, Any] = {"commit": measurement.current_commit(), "card": None}
    found |= measurement.versions()
    if torch.cuda.is_available():
        gpu = measurement.gpu_facts()
        found |= {"card": gpu["gpu"], "driver": gpu["driver"], "cuda": gpu["cuda"], "nvrtc": gpu["compiler"]}
    print(json.dumps(found))


def path_of(kind: str, card: str, directory: Path | None = None) -> Path:
    """Where the record of ``card`` is."""
    return (directory or DIRECTORY) / f"device-{kind}-{card_of(card)}.json"


def write(kind: str, record: Mapping[str, Any], directory: Path | None = None) -> Path | None:
    """Write a record, and say where; nothing where there is no card."""
    if record["card"] is None:
        print("no record is written: there is no CUDA device")
        return None
    path = path_of(kind, record["card"], directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: value for name, value in record.items() if name != "gpu_code"}
    path.write_text(_text(ordered | {"gpu_code": record["gpu_code"]}))
    print(f"recorded in {path}")
    return path


def _text(record: Mapping[str, Any]) -> str:
    """JSON with a line for each entry, for each item of a list or dict, and for each folder of the GPU code."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_lines(value)}" for name, value in record.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)
