"""Provides layers for ``kernelize`` of the Hugging Face ``kernels`` package: generated kernels in place of a model's
own.

::

    from kernels import Mode, kernelize, use_kernel_mapping
    from jitgen.huggingface import layers

    with use_kernel_mapping(layers.mapping()):
        model = kernelize(model, mode=Mode.INFERENCE, device="cpu")

A layer replaces the ``forward`` of modules of the same layer name, and uses their parameters; so it has no constructor
and no members but those that ``kernels`` knows. Nothing is fetched. ``register_attention`` enters ``attention`` into
the table of attention functions that transformers has.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from jitgen.call.function import JitFunction
from jitgen.errors import UnsupportedError


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    ).transpose(1, 2)


_functions: tuple[Any, ...] = (_rms_norm, _silu_and_mul, _rotary, _attend)
_kernels: dict[Any, JitFunction[..., Any]] = {function: JitFunction(function) for function in _functions}


class RMSNorm(nn.Module):
    """Replaces ``RMSNorm`` of Llama and models like it: the module has ``weight`` and ``variance_epsilon``."""

    can_torch_compile = True
    has_backward = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return _kernels[_rms_norm](hidden_states, self.weight, self.variance_epsilon)


class SiluAndMul(nn.Module):
    """Computes ``silu`` of the first half of the last dimension times the second half."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> Any:
        return _kernels[_silu_and_mul](x)


class Rotary(nn.Module):
    """Rotates queries and keys by halves, with ``cos`` and ``sin`` of each position (``rotary_pos_emb``)."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        return _kernels[_rotary](q, k, cos, sin, unsqueeze_dim)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as transformers calls it, after ``register_attention()`` and with
    ``attn_implementation="jitgen"``.

    Args:
        query: (batch, heads, M, D). key, value: (batch, fewer heads, N, D). attention_mask: added to scores, or bool.
        others: what models pass besides. ``sliding_window`` is in the mask already.

    Returns:
        (batch, M, heads, D), and None for the weights, which no kernel keeps.

    Raises:
        UnsupportedError: for dropout, for weights, for each of ``CHANGES_RESULTS``, and without the masks that
            ``register_attention`` enters.
    """
    if dropout:
        raise UnsupportedError("attention by jitgen has no dropout; call model.eval(), or set attention_dropout=0")
    if others.get("output_attentions"):
        raise UnsupportedError("attention by jitgen keeps no weights; use attn_implementation='eager' for them")
    for name in CHANGES_RESULTS:
        if others.get(name) is not None:
            raise UnsupportedError(f"attention by jitgen has no {name}; use attn_implementation='eager' for this model")
    if attention_mask is None:
        _check_needs_no_mask(module, key.shape[2], others.get("sliding_window"))
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    causal = causal and attention_mask is None and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _kernels[_attend](query, key, value, attention_mask, causal, scale), None


CHANGES_RESULTS = (
    *("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices"),
    *("head_mask", "layer_head_mask", "score_mod", "cache"),
)
"""What some models pass to attention and ``attention`` does not compute, such as the soft cap of Gemma 2 and the sinks
(``s_aux``) of gpt-oss."""


def _check_needs_no_mask(module: nn.Module, keys: int, window: int | None) -> None:
    """Raises unless causality alone masks the scores, which is what happens without a mask. transformers makes no masks
    for a name that has no mask function: neither for padding nor for earlier chunks nor for windows."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is not None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        if name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            raise UnsupportedError(
                f"transformers makes no masks for attn_implementation={name!r}; register attention by "
                f"jitgen.huggingface.layers.register_attention({name!r})"
            )
    if window is not None and keys > window:
        raise UnsupportedError(f"{keys} keys are more than the sliding window of {window}, and there is no mask")


def register_attention(name: str = "jitgen") -> None:
    """Makes ``attn_implementation=name`` known to transformers, with the masks that ``attention`` takes.

    Models that compute attention themselves, such as Bloom and GPT-J, look no function up by name and could do nothing
    with these masks. They keep the attention and the masks that they have by default, and a warning says so.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    if not _names:
        _choose_by_model()
    _names.add(name)


_names: set[str] = set()
"""The names under which ``attention`` is registered."""


def _choose_by_model() -> None:
    """Has transformers ask ``attends_by_name`` where a model decides on its attention.

    ``PreTrainedModel`` accepts every registered name there, for every class, and has no hook that could decline one.
    """
    from transformers import PreTrainedModel
    from transformers.utils import logging

    log, choose = logging.get_logger(__name__), PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(choose)
    def chosen(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention not in _names or attends_by_name(type(self)):
            return choose(self, requested_attention, *args, **kwargs)
        own = choose(self, None, *args, **kwargs)
        log.warning_once(
            f"{type(self).__name__} computes attention itself: attn_implementation={requested_attention!r} leaves it "
            f"at {own!r}"
        )
        return own

    PreTrainedModel.get_correct_attn_implementation = chosen


def attends_by_name(model: Any) -> bool:
    """Returns whether models of this class of transformers call a function of ``AttentionInterface`` with the masks of
    SDPA.

    A class that declares neither ``_supports_sdpa`` nor ``_supports_attention_backend`` may call such a function and
    rely on masks that SDPA's leave out, as BigBird-Pegasus does.
    """
    declared = model._supports_sdpa or model._supports_attention_backend
    return bool(declared and model._can_set_attn_implementation())


LAYERS: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "SiluAndMul": SiluAndMul, "rotary_pos_emb": Rotary}
"""The layer for each name under which models register one with ``kernels``."""


@dataclass(frozen=True)
class Here:
    """Tells ``kernels`` where to find a layer, as what it calls a repository."""

    name: str

    def load(self) -> type[nn.Module]:
        return LAYERS[self.name]

    def __str__(self) -> str:
        return f"jitgen (layer `{self.name}`)"


def mapping(*devices: str) -> dict[str, dict[str, Here]]:
    """Makes a mapping for ``use_kernel_mapping`` and ``register_kernel_mapping``; for ``"cpu"`` and ``"cuda"`` by
    default."""
    return {name: {device: Here(name) for device in devices or ("cpu", "cuda")} for name in LAYERS}
