"""Knows which parameters of three dimensions are the matrices of a mixture of experts: a table of known classes.

A class may use such a parameter in any way, and a quantised weight can be used in few: ``w[i]`` in a product, ``bmm``,
``grouped_mm``. So a class is in the table where its forward was read, or the caller names the parameter. ``quantize_``
and the quantiser of transformers both ask here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection

from torch import nn

FUSED = ("gate_up_proj", "down_proj")
"""Parameters of classes of transformers under ``use_experts_implementation``, of shape (experts, N, K)."""

_NAMES = """
    AXK1 AXK2 Afmoe BailingHybrid Beam Cohere2Moe DeepseekOcr2Text DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4
    DiffusionGemmaText Dots1 Dots3Note Ernie4_5_Moe Ernie4_5_VLMoeMoe ExaoneMoe FlexOlmo Flint Gemma4Text Glm4Moe
    Glm4MoeLite Glm4vMoeText Glm5NextText GlmMoeDsa GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared HYV3 HYV4
    HunYuanMoEV1 Inkling Inkling2 Jamba KimiLinear Kolibri1 Laguna Lfm2Moe Mellum MiMoV2Flash MiniMax MiniMaxM2
    MiniMaxM3VL Mistral4 MistralLarge4Text Mixtral MuseSpark Olmoe Phimoe Qwen2Moe Qwen3Moe Qwen3Next
    Qwen3OmniMoeTalkerText Qwen3OmniMoeThinkerText Qwen3VLMoeText Qwen3_5Moe Qwen4ExpText SolarOpen UnlimitedOcrText
    Zaya
"""

EXPERTS: dict[str, tuple[tuple[str, ...], bool]] = {
    **{f"{name}Experts": (FUSED, False) for name in _NAMES.split()},
    **{f"{name}Experts": (FUSED, True) for name in ("Aria", "GptOss", "Llama4Text", "OpenAIPrivacyFilter")},
    "NemotronHExperts": (("up_proj", "down_proj"), False),
    "JetMoeParallelExperts": (("weight",), False),
}
"""For a class of transformers (5.23), its parameters that are experts, and whether these are (experts, K, N)."""


def experts_of(module: nn.Module, name: str, patterns: Collection[str] = ()) -> dict[str, bool]:
    """Maps each parameter of ``module`` with three dimensions that holds experts to whether its matrices are (K, N).

    Args:
        name: of the module in its model.
        patterns: of fully qualified names (``fnmatch``) of further parameters that are used as ``w[i]`` alone.
    """
    known, transposed = EXPERTS.get(type(module).__name__, ((), False))
    transposed = bool(getattr(module, "is_transposed", transposed))
    parameters = {}
    for leaf in module._parameters:
        full = f"{name}.{leaf}".lstrip(".")
        asked = any(fnmatch.fnmatchcase(full, pattern) for pattern in patterns)
        if rank(module, leaf) == 3 and (leaf in known or asked):
            parameters[leaf] = transposed
    return parameters


def rank(module: nn.Module, leaf: str) -> int:
    """Returns the number of dimensions of a parameter; 0 where it is None or has no shape yet."""
    parameter = module._parameters.get(leaf)
    if parameter is None or isinstance(parameter, nn.parameter.UninitializedParameter):
        return 0
    return parameter.dim()
