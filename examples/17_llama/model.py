"""A decoder of Llama's architecture in plain PyTorch, of which every function that computes is decorated.

One decorated function is a whole block: all layers share its trace and kernels, and the keys and values of a cache are
updated by them. Qwen2's biases of queries, keys and values, and Granite's multipliers, are options. The weights are
those of a model of transformers; ``generate.py`` runs both, and the tests compare their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import jitgen
from jitgen.nn import functional


@dataclass(frozen=True)
class Config:
    """Says what a decoder is like.

    Attributes:
        hidden, inner: width of the residual stream, and within the MLP.
        heads, key_heads, depth: heads of queries, heads of keys and values, and the width of one.
        epsilon: of the norms.
        theta: base of the rotary angles.
        embedding, residual, scores, logits: what these are multiplied by; ``scores`` None for 1 / sqrt(depth).
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    depth: int
    vocabulary: int
    epsilon: float = 1e-5
    theta: float = 500000.0
    embedding: float = 1.0
    residual: float = 1.0
    scores: float | None = None
    logits: float = 1.0

    @classmethod
    def of(cls, config: Any) -> Config:
        """Reads a configuration of transformers."""
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default":
            raise NotImplementedError(f"rotary angles of type {rope['rope_type']}")
        return cls(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            depth=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            epsilon=config.rms_norm_eps,
            theta=rope.get("rope_theta", 10000.0),
            embedding=getattr(config, "embedding_multiplier", 1.0),
            residual=getattr(config, "residual_multiplier", 1.0),
            scores=getattr(config, "attention_multiplier", None),
            logits=1.0 / getattr(config, "logits_scaling", 1.0),
        )


@dataclass
class Layer:
    """Holds the weights of one block, in the order in which it uses them; no biases is ``bias=None``."""

    attention_norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def __iter__(self) -> Any:
        return iter(vars(self).values())


@dataclass
class Cache:
    """Holds keys and values of each layer, (batch, key heads, places, depth), and how many tokens there are."""

    layers: list[tuple[Tensor, Tensor]]
    start: Tensor

    @classmethod
    def empty(cls, config: Config, batch: int, places: int, dtype: torch.dtype, device: torch.device) -> Cache:
        shape = batch, config.key_heads, places, config.depth
        pairs = [torch.zeros(2, *shape, dtype=dtype, device=device).unbind() for _ in range(config.layers)]
        return cls(pairs, torch.zeros(batch, dtype=torch.int64, device=device))


def block_of(config: Config, backend: str) -> Callable[..., Tensor]:
    """Makes the function of one block for decoders of this configuration."""
    epsilon, scale, residual = config.epsilon, config.scores, config.residual
    heads, key_heads, depth = config.heads, config.key_heads, config.depth

    @jitgen.jit(backend=backend)
    def block(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        start: Tensor,
        attention_norm: Tensor,
        qkv: Tensor,
        bias: Tensor | None,
        output: Tensor,
        mlp_norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], attention_norm, epsilon)
        q, k, v = (
            part.unflatten(-1, (-1, depth)).transpose(1, 2)
            for part in F.linear(h, qkv, bias).split([heads * depth, key_heads * depth, key_heads * depth], -1)
        )
        functional.append(keys, functional.rotary(k, cos, sin), start)
        functional.append(values, v, start)
        attended = functional.attend(functional.rotary(q, cos, sin), keys, values, start, scale=scale)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), output) * residual
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], mlp_norm, epsilon), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down) * residual

    return block


def ends_of(config: Config, backend: str) -> tuple[Callable[..., Any], Callable[..., Tensor], Callable[..., Tensor]]:
    """Makes the function before the first block and those after the last one: to logits, and to the likeliest token."""
    half, theta, epsilon = config.depth // 2, config.theta, config.epsilon
    embedding, scale = config.embedding, config.logits

    @jitgen.jit(backend=backend)
    def begin(tokens: Tensor, words: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the embedded tokens, and cosines and sines of their angles."""
        places = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        frequencies = theta ** (-torch.arange(half, device=tokens.device) / half)
        angles = (places[..., None].float() * frequencies)[:, None]
        return F.embedding(tokens, words) * embedding, angles.cos(), angles.sin()

    @jitgen.jit(backend=backend)
    def end(x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """Returns the logits after the last token."""
        return F.linear(F.rms_norm(x[:, -1], x.shape[-1:], norm, epsilon), head) * scale

    @jitgen.jit(backend=backend)
    def likeliest(x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """Returns the token of the largest logit; up to eight rows of logits are never stored."""
        return F.linear(F.rms_norm(x[:, -1], x.shape[-1:], norm, epsilon), head).argmax(-1)

    return begin, end, likeliest


class Decoder:
    """Runs a decoder: ``decoder(tokens, cache)`` returns the logits after the last of ``tokens`` (batch, T)."""

    def __init__(self, config: Config, words: Tensor, layers: Sequence[Layer], norm: Tensor, head: Tensor):
        self.config = config
        self.words, self.layers, self.norm, self.head = words, layers, norm, head
        backend = "auto"
        self._block = block_of(config, backend)
        self._begin, self._end, self._likeliest = ends_of(config, backend)

    @classmethod
    def of(cls, model: Any) -> Decoder:
        """Takes the weights of a model of transformers (Llama, Mistral, Qwen2, Granite)."""
        config, weights = Config.of(model.config), {name: p.data for name, p in model.named_parameters()}

        def layer(index: int) -> Layer:
            def weight(*names: str, kind: str = "weight") -> Tensor:
                return torch.cat([weights[f"model.layers.{index}.{name}.{kind}"] for name in names])

            projections = [f"self_attn.{name}_proj" for name in "qkv"]
            has_bias = f"model.layers.{index}.{projections[0]}.bias" in weights
            return Layer(
                weight("input_layernorm"),
                weight(*projections),
                weight(*projections, kind="bias") if has_bias else None,
                weight("self_attn.o_proj"),
                weight("post_attention_layernorm"),
                weight("mlp.gate_proj", "mlp.up_proj"),
                weight("mlp.down_proj"),
            )

        words = weights["model.embed_tokens.weight"]
        head = weights.get("lm_head.weight", words)
        return cls(config, words, [*map(layer, range(config.layers))], weights["model.norm.weight"], head)

    def quantize(self, weights: str, group_size: int = 128) -> None:
        """Quantises the products of all blocks, but not the head."""
        for layer in self.layers:
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(layer, name, jitgen.quantize(getattr(layer, name), weights, group_size=group_size))

    def cache(self, batch: int, places: int) -> Cache:
        return Cache.empty(self.config, batch, places, self.words.dtype, self.words.device)

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        return self._run(tokens, cache, self._end)

    @torch.no_grad()
    def _run(self, tokens: Tensor, cache: Cache, end: Callable[..., Tensor]) -> Tensor:
        x, cos, sin = self._begin(tokens, self.words, cache.start)
        for layer, (keys, values) in zip(self.layers, cache.layers, strict=True):
            x = self._block(x, cos, sin, keys, values, cache.start, *layer)
        cache.start += tokens.shape[1]
        return end(x, self.norm, self.head)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        choose: Callable[[Tensor], Tensor] | None = None,
        put: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """Returns ``tokens`` and ``count`` more, each as ``choose`` picks it of the logits (batch, vocabulary), or the
        likeliest; ``put`` is called with the new ones of each step."""
        cache = self.cache(tokens.shape[0], tokens.shape[1] + count)
        new = tokens
        for _ in range(count):
            chosen = self._run(new, cache, self._likeliest) if choose is None else choose(self(new, cache))
            if put is not None:
                put(chosen)
            new = chosen[:, None]
            tokens = torch.cat((tokens, new), 1)
        return tokens


@jitgen.jit
def draw(logits: Tensor, temperature: float) -> Tensor:
    """Draws a token of softmax(logits / temperature), as the largest of probabilities over exponential numbers."""
    chances = torch.softmax(logits.float() / temperature, -1)
    return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


@jitgen.jit
def draw_of_the_largest(logits: Tensor, count: int, temperature: float, share: float) -> Tensor:
    """Draws among the ``count`` largest logits, of which the fewest that have ``share`` of the probability together.

    The logits are read once, and what follows has ``count`` numbers a row.
    """
    largest, tokens = torch.topk(logits, count, -1)
    chances = torch.softmax(largest.float() / temperature, -1)
    chances = torch.where(chances.cumsum(-1) - chances < share, chances, 0.0)
    place = (chances / torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True)
    return tokens.gather(-1, place).squeeze(-1)


@jitgen.jit
def without_the_least_likely(logits: Tensor, temperature: float, share: float) -> Tensor:
    """Hides what is not among the fewest tokens that have ``share`` of the probability together."""
    ordered = torch.sort(logits, -1, descending=True).values
    chances = torch.softmax(ordered.float() / temperature, -1)
    least = torch.where(chances.cumsum(-1) - chances < share, ordered, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < least, -torch.inf)


def sampler(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Callable[..., Tensor] | None:
    """Makes what ``generate`` chooses tokens with: None, the likeliest, for a temperature of 0."""
    if temperature == 0:
        return None

    def choose(logits: Tensor) -> Tensor:
        if top_k is not None:
            return draw_of_the_largest(logits, top_k, temperature, 2.0 if top_p is None else top_p)
        if top_p is not None:
            logits = without_the_least_likely(logits, temperature, top_p)
        return draw(logits, temperature)

    return choose
