"""Moves factors of columns from activations to weights, so that both lose less where they are quantised: SmoothQuant
(Xiao et al.), and the scaling of AWQ (Lin et al.).

What returns a product's activation, a norm or another product, is divided by the factors, and the product's columns are
multiplied by them. That changes nothing where nothing else reads what is divided, and where what lies between commutes
with factors of columns: attention does for values, and SwiGLU for its second half. Whether that is so is asked of the
model itself: it runs with factors that are powers of two, which round nothing in any dtype, and its result must stay
the same. Elsewhere, products that quantise their activations keep SmoothQuant's factors beside the weight, and apply
them as they quantise (``Format.smoothed``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from jitgen.quant.activations import quantized
from jitgen.quant.observed import Observed, Source, Substitute
from jitgen.quant.planned import Job
from jitgen.quant.quantize import quantize

MIGRATIONS = tuple(step / 20 for step in range(6, 18, 2))
"""Values of SmoothQuant's alpha that are tried: how much of the range of activations goes to weights."""
EXPONENTS = tuple(step / 10 for step in range(10))
"""The powers of activations' magnitudes that AWQ's factors are tried with."""
LARGEST_FACTOR, LARGEST_STEP = 1e2, 7
"""Factors of AWQ lie between its reciprocal and this, and those of SmoothQuant are 2 to at most this power."""
SAME = 1e-3
"""The largest difference of a model's result, relative to its norm, with factors that round nothing: what kernels of
other orders of sums may make of it."""
PROBES = (0.5, 1.0, 2.0)
"""The factors that the model is tried with."""

Result = Callable[[Mapping[int, Substitute]], Sequence[torch.Tensor]]
"""Runs a model with substitutes for its Parameters, and returns the tensors of its result."""


@dataclass
class Factors:
    """Holds what is moved: by the id of a Parameter, the factors of its rows or elements, and of its columns; and
    factors of columns that a weight is to keep beside it (``stored``)."""

    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    columns: dict[int, torch.Tensor] = field(default_factory=dict)
    stored: dict[int, torch.Tensor] = field(default_factory=dict)

    def concerns(self, job: Job) -> bool:
        """Returns whether the weight of ``job`` has any factors."""
        return any(id(job.weight) in factors for factors in (self.rows, self.columns, self.stored))

    def scaled(self, job: Job) -> torch.Tensor:
        """Returns the weight of ``job``, (N, K), with its factors; the weight itself where it has none."""
        dense, rows, columns = job.dense, self.rows.get(id(job.weight)), self.columns.get(id(job.weight))
        if rows is None and columns is None:
            return dense
        wide = dense.detach().float()
        wide = wide if rows is None else wide * rows.unsqueeze(1)
        return wide if columns is None else wide * columns

    def divide(self, model: torch.nn.Module) -> None:
        """Divides the vectors of ``model``, of norms and biases, in place."""
        with torch.no_grad():
            for parameter in model.parameters():
                if id(parameter) in self.rows and parameter.dim() == 1:
                    parameter.copy_(parameter.float() * self.rows[id(parameter)])


@dataclass(frozen=True)
class Group:
    """Pairs what returns an activation with the products that multiply it."""

    source: Source
    readers: tuple[Job, ...]


def groups(
    jobs: Sequence[Job], observed: Mapping[int, Observed], parameters: Mapping[int, torch.Tensor]
) -> list[Group]:
    """Lists the groups that may have factors, those of norms first, in the order of the model."""
    candidates: dict[tuple[Source, int], list[Job]] = {}
    for job in jobs:
        known = observed[id(job.weight)]
        for source in known.sources:
            is_known = source.weight in parameters and (source.bias is None or source.bias in parameters)
            if is_known and job.weight.dim() == 2:
                # Of the products before it, that which returned the activation is not known, and others are no readers.
                candidates.setdefault((source, known.sharing if source.is_linear else 0), []).append(job)
    ordered = sorted(candidates.items(), key=lambda item: item[0][0].is_linear)
    return [Group(source, tuple(readers)) for (source, _), readers in ordered]


class Migration:
    """Finds the factors of a model.

    Args:
        method: ``"smoothquant"`` or ``"awq"``.
        parameters: of the model, by their ids.
        jobs: the weights to quantise.
        result: runs the model on a batch.
    """

    def __init__(
        self,
        method: str,
        parameters: Mapping[int, torch.Tensor],
        jobs: Sequence[Job],
        observed: Mapping[int, Observed],
        result: Result,
    ) -> None:
        self.method, self.parameters, self.observed, self.result = method, parameters, observed, result
        self.jobs = {id(job.weight): job for job in jobs if observed[id(job.weight)].is_finite}
        self.factors = Factors()

    def find(self) -> Iterator[int]:
        """Finds all factors, and yields how many groups of products are done."""
        expected = self.result({})
        divided: set[int] = set()
        for number, group in enumerate(groups(list(self.jobs.values()), self.observed, self.parameters), 1):
            readers = tuple(job for job in group.readers if id(job.weight) not in self.factors.columns)
            size = self._size(group.source)
            fits = readers and all(job.dense.shape[-1] == size for job in readers)
            if fits and group.source.weight not in divided:
                tried = Group(group.source, readers)
                if distance(self.result(self._probes(tried, size)), expected) <= SAME:
                    self._move(tried)
                    divided.add(group.source.weight)
            yield number
        if self.method == "smoothquant":
            self._store()

    def _store(self) -> None:
        """Finds the factors that weights keep: of those that multiply the same tensors, the same ones."""
        shared: dict[int, list[Job]] = {}
        for number, job in self.jobs.items():
            if job.kind is not None and number not in self.factors.columns:
                shared.setdefault(self.observed[number].sharing, []).append(job)
        for readers in shared.values():
            factors = self._smoothing(readers)
            if bool((factors != 1).any()):
                self.factors.stored |= {id(job.weight): factors for job in readers}

    def _size(self, source: Source) -> int:
        """Returns the number of columns that ``source`` returns; 0 for a weight that is not quantised itself."""
        if source.is_linear:
            job = self.jobs.get(source.weight)
            return 0 if job is None or job.weight.dim() != 2 else job.dense.shape[0]
        return self.parameters[source.weight].shape[0]

    def _probes(self, group: Group, size: int) -> dict[int, Substitute]:
        """Returns Parameters with factors that round nothing."""
        generator = torch.Generator().manual_seed(size)
        chosen = torch.tensor(PROBES)[torch.randint(len(PROBES), (size,), generator=generator)]
        weight = self.parameters[group.source.weight]
        factors = chosen.to(weight.device, weight.dtype)
        rows = factors
        if group.source.is_linear and not self.jobs[group.source.weight].transposed:
            rows = factors.unsqueeze(1)
        probes = {group.source.weight: Substitute(partial(torch.div, weight, rows))}
        if group.source.bias is not None:
            bias = self.parameters[group.source.bias]
            probes[group.source.bias] = Substitute(partial(torch.div, bias, factors))
        for job in group.readers:
            of_job = factors.to(job.weight.dtype)
            columns = of_job.unsqueeze(1) if job.transposed else of_job
            probes[id(job.weight)] = Substitute(partial(torch.mul, job.weight, columns))
        return probes

    def _move(self, group: Group) -> None:
        factors = self._smoothing(group.readers) if self.method == "smoothquant" else self._awq(group.readers)
        source = group.source
        if not source.is_linear:  # the norm's own weight is rounded: what it has become is what products make good
            before = self.parameters[source.weight]
            after = (before.float() / factors).to(before.dtype).float()
            factors = torch.where(after == 0, factors, before.float() / torch.where(after == 0, 1.0, after))
        for parameter in (source.weight, source.bias):
            if parameter is not None:
                self.factors.rows[parameter] = 1 / factors
        for job in group.readers:
            self.factors.columns[id(job.weight)] = factors
            observed = self.observed[id(job.weight)]
            assert observed.largest is not None
            assert observed.squares is not None
            observed.largest, observed.squares = observed.largest / factors, observed.squares / factors.square()

    def _smoothing(self, readers: Sequence[Job]) -> torch.Tensor:
        """Returns SmoothQuant's factors, rounded to powers of two, which round neither activations nor norms in any
        dtype: those with the least error of the products of sampled rows, or ones."""
        largest = self._largest(readers)
        weights = [self.factors.scaled(job).detach().float() for job in readers]
        of_weight = torch.cat([weight.flatten(0, -2) for weight in weights]).abs().amax(0).clamp(min=1e-5)
        rows = torch.cat(self.observed[self.observed[id(readers[0].weight)].sharing].samples).float()
        best, least = torch.ones_like(largest), float("inf")
        for alpha in (None, *MIGRATIONS):
            steps = torch.zeros_like(largest)
            if alpha is not None:
                steps = alpha * largest.log2() - (1 - alpha) * of_weight.log2()
                steps = (steps - steps.mean()).round().clamp(-LARGEST_STEP, LARGEST_STEP)
            factors, error = steps.exp2(), 0.0
            for job, weight in zip(readers, weights, strict=True):
                error += _error(rows, weight, factors, job)
            if error < least:
                best, least = factors, error
        return best

    def _awq(self, readers: Sequence[Job]) -> torch.Tensor:
        """Returns the factors with the least error of the products, as the formats of their weights have them."""
        squares = torch.stack([self.observed[id(job.weight)].mean_squares for job in readers]).mean(0)
        magnitude = squares.sqrt().clamp(min=1e-4)
        best, least = torch.ones_like(magnitude), float("inf")
        for exponent in EXPONENTS:
            factors = magnitude**exponent
            factors = (factors / (factors.max() * factors.min()).sqrt()).clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)
            error = 0.0
            for job in readers:
                dense = self.factors.scaled(job).detach().float()
                rounded = quantize(dense * factors, job.row.name, job.group_size, importance=squares / factors.square())
                error += float(((rounded.dequantize(torch.float32) / factors - dense).square() * squares).sum())
            if error < least:
                best, least = factors, error
        return best

    def _largest(self, readers: Sequence[Job]) -> torch.Tensor:
        seen = [self.observed[id(job.weight)].largest for job in readers]
        return torch.stack([one for one in seen if one is not None]).amax(0).clamp(min=1e-5)


def _error(rows: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, job: Job) -> float:
    """Returns the sum of squared errors of the products of ``rows`` with ``weight``, (N, K), where their columns are
    divided and multiplied by ``factors`` and both are quantised as ``job`` says."""
    made = quantize(weight * factors, job.row.name, job.group_size, method="absmax", activation=job.kind)
    activations = rows / factors if job.kind is None else quantized(rows / factors, job.kind)
    lost = activations @ made.dequantize(torch.float32).flatten(0, -2).T - rows @ weight.flatten(0, -2).T
    return float(lost.square().sum())


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference of two results, relative to the norm of the second; infinity for NaN."""
    pairs = [(one.float(), other.float()) for one, other in zip(ours, theirs, strict=True) if one.is_floating_point()]
    worst = max(((float((a - b).norm() / b.norm().clamp(min=1e-30))) for a, b in pairs), default=0.0)
    return worst if worst == worst else float("inf")
