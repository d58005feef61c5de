"""Computes special functions by plain formulas: gamma functions, inverse error functions, Bessel functions of order 0
and 1.

Each formula has the accuracy of float64, and is computed in the dtype of its argument: a result is within 1e-14 of its
size in float64. Where lgamma, digamma or polygamma of a negative argument is 0, terms of the reflection formula cancel,
and the error is theirs. Functions without such a formula (their sums have a number of terms that depends on the
argument) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.ir.custom_gradients import with_gradient
from jitgen.trace.compositions.pointwise import floating
from jitgen.trace.table import composition


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Any:
    """Evaluates ``coefficients[0] + coefficients[1] * x + ...``"""
    result: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


# ------------------------------------------------------------------------------------------------------ gamma functions

SHIFT = 8
"""Stirling's series is for arguments of this size at least: its terms below reach float64's roundoff there."""
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
"""The Bernoulli numbers B2, B4, ... of Stirling's series."""
# fmt: off
AROUND_TWO = (
    0.42278433509846713, 0.3224670334241132, -0.0673523010531981, 0.020580808427784546,
    -0.007385551028673986, 0.0028905103307415234, -0.001192753911703261, 0.0005096695247430425,
    -0.00022315475845357939, 9.945751278180853e-05, -4.492623673813314e-05, 2.050721277567069e-05,
    -9.439488275268397e-06, 4.374866789907488e-06, -2.039215753801366e-06, 9.55141213040742e-07,
    -4.492469198764566e-07, 2.1207184805554665e-07, -1.0043224823968099e-07, 4.7698101693639804e-08,
    -2.2711094608943164e-08, 1.0838659214896955e-08, -5.183475041970047e-09, 2.4836745438024785e-09,
    -1.1921401405860912e-09, 5.731367241678862e-10, -2.7595228851242334e-10, 1.330476437424449e-10,
)
"""lgamma(2 + z) / z for z in [-1/2, 1/2], by powers of z: 1 - Euler's constant, then (-1)^n (zeta(n) - 1) / n."""
ROOT, REST_OF_ROOT = 1.4616321449683622, 9.549995429965697e-17
"""The positive zero of digamma, in two numbers."""
AROUND_ROOT = (
    0.9676722454476212, -0.4427631689835921, 0.258499760955651, -0.16394270544240652,
    0.10782405069126237, -0.07219956125645471, 0.04880428816414311, -0.03316112647484736,
    0.022597648232218104, -0.01542476590494896, 0.010538791616612175, -0.007204534386356869,
    0.004926781395729853, -0.003369801655439328, 0.002305126326734928, -0.0015769367714301972,
    0.0010788252019162967, -0.0007380709389960052, 0.000504953265834602, -0.0003454680251063077,
    0.00023635601564027053, -0.00016170622091974803, 0.0001106337276874741,
)
"""digamma(ROOT + z) / z for z in [-1/4, 1/4], by powers of z: polygamma(n, ROOT) / n!, from n = 1."""
# fmt: on


def _sine_of_pi(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sin(pi x) and cos(pi x) up to their common sign, by the distance to the nearest integer.

    For x < 0.5, and for 0.25 elsewhere: there the reflection formula is not for x, and its gradient would be NaN.
    """
    mirrored = torch.where(x < 0.5, x, 0.25)
    rest = (mirrored - mirrored.round()) * math.pi
    return rest.sin(), rest.cos()


def _is_pole(x: Tensor) -> Tensor:
    return (x <= 0) & (x == x.floor()) & x.isfinite()


@composition("lgamma", "gammaln")
def lgamma(input: Tensor) -> Tensor:
    """Computes Stirling's series; smaller arguments come by the recurrence from [1.5, 2.5), where the logarithm is a
    series with the factor x - 2, and those below 0.5 by the reflection formula.

    In float64, since the terms of the reflection formula cancel where the result is 0.
    """
    x = floating(input).double()
    mirrored = torch.where(x < 0.5, 1 - x, x)
    small = mirrored < SHIFT
    base = torch.where(small, mirrored, 2.0)
    product = torch.ones_like(base)
    for _ in range(SHIFT - 2):
        above = base >= 2.5
        base = torch.where(above, base - 1, base)
        product = torch.where(above, product * base, product)
    below = base < 1.5  # there lgamma(x) = lgamma(x + 1) - log(x)
    from_one = torch.where(below, base - 1, 0.0)
    from_two = torch.where(below, from_one, base - 2)
    near = from_two * _polynomial(from_two, AROUND_TWO) + product.log() - torch.log1p(from_one)
    large = torch.where(small, float(SHIFT), mirrored)
    series = [number / (2 * k * (2 * k - 1)) for k, number in enumerate(BERNOULLI, 1)]
    inverse = 1 / large
    far = (large - 0.5) * large.log() - large + 0.5 * math.log(2 * math.pi)
    value = torch.where(small, near, far + inverse * _polynomial(inverse * inverse, series))
    sine, _ = _sine_of_pi(x)
    reflected = math.log(math.pi) - sine.abs().log() - value
    value = torch.where(x < 0.5, reflected, value)
    value = torch.where(x.isinf() | _is_pole(x), math.inf, value)
    return with_gradient(value, x, digamma(x)).to(floating(input).dtype)


@composition("digamma", "psi")
def digamma(input: Tensor) -> Tensor:
    """Computes the derivative of ``lgamma``; NaN at negative integers, as in torch. In float64, as ``lgamma``."""
    x = floating(input).double()
    mirrored = torch.where(x < 0.5, 1 - x, x)
    missing: Any = 0
    for k in range(SHIFT):
        missing = missing + 1 / (mirrored + k)
    large = mirrored + SHIFT
    square = 1 / (large * large)
    series = [number / (2 * k) for k, number in enumerate(BERNOULLI, 1)]
    value = large.log() - 0.5 / large - square * _polynomial(square, series) - missing
    from_root = (x - ROOT) - REST_OF_ROOT
    around = from_root.abs() <= 0.25
    from_root = torch.where(around, from_root, 0.0)
    value = torch.where(around, from_root * _polynomial(from_root, AROUND_ROOT), value)
    sine, cosine = _sine_of_pi(x)
    value = torch.where(x < 0.5, value - math.pi * cosine / sine, value)
    value = torch.where(_is_pole(x), math.nan, torch.where(x == math.inf, math.inf, value))
    value = torch.where(x == 0, torch.copysign(torch.full_like(x, math.inf), -x), value)
    return with_gradient(value, x, _polygamma(1, x)).to(floating(input).dtype)


MOST_DERIVATIVES = 16
"""The highest order of ``polygamma``."""


@composition("polygamma")
def polygamma(n: Any, input: Any) -> Tensor:
    """Computes ``torch.polygamma(n, x)`` and ``x.polygamma(n)``: the derivative of order ``n`` of ``digamma``."""
    order, x = (int(input), n) if isinstance(n, Tensor) else (int(n), input)
    if order < 0:
        raise ValueError("polygamma(n, x) does not support negative n")
    if order > MOST_DERIVATIVES:
        raise UnsupportedError(f"polygamma of order {order} is not supported; up to {MOST_DERIVATIVES} are")
    if order == 0:
        return digamma(x)
    x = floating(x)
    return with_gradient(_polygamma(order, x), x, _polygamma(order + 1, x))


def _polygamma(order: int, x: Tensor) -> Tensor:
    """Sums ``(x + k)^-(order + 1)``: ``SHIFT`` terms, and Euler and Maclaurin's series for the rest. Below 1/2 by the
    reflection formula, whose derivatives are polynomials in the cotangent."""
    mirrored = torch.where(x < 0.5, 1 - x, x)
    power, shift = order + 1, SHIFT + order
    total: Any = 0
    for k in range(shift):
        total = total + _power(1 / (mirrored + k), power)
    inverse = 1 / (mirrored + shift)
    factor, series = 1.0 * power, []
    for k, number in enumerate(BERNOULLI, 1):
        series.append(number / math.factorial(2 * k) * factor)
        factor *= (power + 2 * k - 1) * (power + 2 * k)
    rest = 1 / (power - 1.0) + inverse * (0.5 + inverse * _polynomial(inverse * inverse, series))
    total = total + _power(inverse, power - 1) * rest
    value = total * ((-1) ** (order + 1) * math.factorial(order))
    sine, cosine = _sine_of_pi(x)
    cotangent = [0.0, 1.0]
    for _ in range(order):  # the derivative of cot is -(1 + cot^2)
        slope = [-(k + 1) * c for k, c in enumerate(cotangent[1:])]
        cotangent = [a + b for a, b in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope], strict=True)]
    reflected = (-1) ** order * value - math.pi ** (order + 1) * _polynomial(cosine / sine, cotangent)
    value = torch.where(x < 0.5, reflected, value)
    if order > 1:  # torch's sum has no limit there
        value = torch.where(x == math.inf, math.nan, value)
    return torch.where(_is_pole(x), (-1) ** (order + 1) * math.inf, value)


def _power(x: Tensor, exponent: int) -> Tensor:
    """Raises ``x`` to a power by repeated squaring."""
    result, square = None, x
    while exponent:
        if exponent & 1:
            result = square if result is None else result * square
        exponent >>= 1
        square = square * square if exponent else square
    return torch.ones_like(x) if result is None else result


@composition("mvlgamma", "multigammaln")
def mvlgamma(input: Tensor, p: int) -> Tensor:
    """Computes the multivariate log-gamma; NaN where torch asks for elements above ``(p - 1) / 2``."""
    x = floating(input)
    if p < 1:
        raise ValueError("p has to be greater than or equal to 1")
    total: Any = p * (p - 1) / 4 * math.log(math.pi)
    for j in range(int(p)):
        total = total + lgamma(x - 0.5 * j)
    return torch.where(x > (p - 1) / 2, total, math.nan)


# ------------------------------------------------------------------------------------------------------ error functions


def _improved(x: Tensor, error: Tensor) -> Tensor:
    """Takes a step of Halley's method for erf, from ``erf(x) - y``; each triples the correct digits."""
    newton = error * (0.5 * math.sqrt(math.pi)) * (x * x).exp()
    return x - newton / (1 + x * newton)


def _at_the_ends(y: Tensor, is_inside: Tensor) -> Tensor:
    """Returns the values for ``y`` outside (-1, 1): an infinity at the ends, NaN beyond, and gradients that are the
    same."""
    outside = torch.where(is_inside, 0.0, y)
    return outside * torch.rsqrt(1 - outside * outside)


def _inverse_erfc(q: Tensor) -> Tensor:
    """Inverts erfc for 0 < q <= 1/2 by Winitzki's formula, which is off by 0.4 percent at most, improved twice."""
    logarithm = q.log() + torch.log1p(1 - q)
    a = 0.147
    half = 2 / (math.pi * a) + 0.5 * logarithm
    x = ((half * half - logarithm / a).sqrt() - half).sqrt()
    for _ in range(3):
        x = _improved(x, q - torch.erfc(x))
    return x


@composition("erfinv")
def erfinv(input: Tensor) -> Tensor:
    """Gives each formula an argument that it is valid for, elsewhere too, so that gradients are numbers."""
    y = floating(input)
    size = y.abs()
    inside, central = size < 1, size <= 0.5
    near = torch.where(central, y, 0.0)
    square = near * near
    terms = [0.5 * math.sqrt(math.pi) * c for c in (1.0, math.pi / 12, 7 * math.pi**2 / 480)]
    small = near * _polynomial(square, terms)
    for _ in range(2):
        small = _improved(small, torch.erf(small) - near)
    large = torch.copysign(_inverse_erfc(torch.where(inside & ~central, 1 - size, 0.5)), y)
    value = torch.where(inside, torch.where(central, small, large), _at_the_ends(y, inside))
    return _inverse(value, y, 0.5 * math.sqrt(math.pi), 1.0)


def _inverse(value: Tensor, operand: Tensor, factor: float, rate: float) -> Tensor:
    """Returns ``value`` with the derivative ``factor * exp(rate * value^2)`` by its operand."""
    for _ in range(2):  # the second derivative reads a value with this derivative
        value = with_gradient(value, operand, (value * value * rate).exp() * factor)
    return value


@composition("ndtri")
def ndtri(input: Tensor) -> Tensor:
    """Returns the argument at which the normal distribution reaches a probability."""
    p = floating(input)
    inside, central = (p > 0) & (p < 1), (p > 0.25) & (p < 0.75)
    tail = torch.where(inside & ~central, torch.where(p < 0.5, p, 1 - p), 0.25)
    outer = torch.copysign(_inverse_erfc(2 * tail), p - 0.5)
    inner = erfinv(torch.where(central, 2 * p - 1, 0.0))
    ends = _at_the_ends(2 * p - 1, inside)
    value = torch.where(inside, torch.where(central, inner, outer) * math.sqrt(2), ends)
    return _inverse(value, p, math.sqrt(2 * math.pi), 0.5)


FAR = 7.0
"""From here on the asymptotic series of ``erfcx`` reaches float64's roundoff."""


@composition("erfcx")
def erfcx(input: Tensor) -> Tensor:
    """Computes exp(x^2) erfc(x). The square is rounded in two pieces, the first of which is exact."""
    x = floating(input)
    near = torch.where(x < FAR, x, FAR)
    coarse = (near * 16).round() / 16
    direct = (coarse * coarse).exp() * ((near - coarse) * (near + coarse)).exp() * torch.erfc(near)
    far = torch.where(x < FAR, FAR, x)
    inverse = 0.5 / (far * far)
    series = [1.0]
    for k in range(1, 20):
        series.append(-series[-1] * (2 * k - 1))
    asymptotic = _polynomial(inverse, series) / (far * math.sqrt(math.pi))
    value = torch.where(x < FAR, direct, asymptotic)
    value = torch.where(x < -30, math.inf, value)
    falling = [-(2 * k + 1) * term for k, term in enumerate(series)]
    slope = _polynomial(inverse, falling) / (far * far * math.sqrt(math.pi))
    return with_gradient(value, x, torch.where(x < FAR, 2 * near * value - 2 / math.sqrt(math.pi), slope))


HEAD, TAIL = 11585 / 2**14, 1.44960302975244e-05
"""The square root of 1/2 in two numbers. The product of the first and a number of 10 bits is exact in float32."""
BEYOND_THE_NORMAL = 40.0
"""From here on the normal distribution is 1, and below its negative 0, in float64 too."""


@composition("ndtr")
def ndtr(input: Tensor) -> Tensor:
    """Computes the normal distribution, erfc(-x sqrt(1/2)) / 2. In its tail the rounding of that argument would be seen
    x^2 times as large, so the product is of two numbers, and the smaller one is added by erfc's derivative."""
    x = floating(input)
    near = x.clamp(-BEYOND_THE_NORMAL, BEYOND_THE_NORMAL)
    coarse = (near * 16).round() / 16
    fine = near - coarse
    head, tail = coarse * -HEAD, coarse * -TAIL - fine * math.sqrt(0.5)
    argument = head + tail
    lost = (head - argument) + tail
    value = 0.5 * torch.erfc(argument) - lost * (-argument * argument).exp() * (1 / math.sqrt(math.pi))
    density = (coarse * coarse * -0.5).exp() * (fine * (near + coarse) * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return with_gradient(value, x, density)


@composition("log_ndtr")
def log_ndtr(input: Tensor) -> Tensor:
    """Computes the logarithm of ``ndtr``, also where that is below the smallest number."""
    x = floating(input)
    scaled = x * math.sqrt(0.5)
    low = (erfcx(-scaled.clamp(max=0)) * 0.5).log() - scaled * scaled
    high = torch.log1p(-ndtr(-torch.where(x < -1, 0.0, x)))
    return with_gradient(torch.where(x < -1, low, high), x, math.sqrt(2 / math.pi) / erfcx(-scaled))


# ----------------------------------------------------------------------------------------------------- Bessel functions

NEAR_BOUND = 8.0
# fmt: off
NEAR: tuple[tuple[float, ...], ...] = (
    (
        0.6767952744094761, -0.3046826723431984, 0.17162090152220877, -0.09490109704804764,
        0.04930528423967071, -0.02373741480589947, 0.010546460394594998, -0.004324309995050576,
        0.0016394756169413357, -0.0005763755745385824, 0.00018850288509584165, -5.754195010082104e-05,
        1.6448448070728896e-05, -4.4167383584587505e-06, 1.1173875391201037e-06, -2.670793853940612e-07,
        6.046995022541919e-08, -1.300025009986248e-08, 2.6598237246823866e-09, -5.189795601635263e-10,
        9.675809035373237e-11, -1.726826291441556e-11, 2.95505266312964e-12, -4.856446783111929e-13,
        7.676185498604936e-14, -1.1685332877993451e-14, 1.715391285555133e-15, -2.431279846547955e-16,
        3.3307945188222384e-17, -4.4153416464793395e-18,
    ),
    (
        0.25258718644363365, -0.17641651835783406, 0.1026436586898471, -0.05294598120809499,
        0.024726449030626516, -0.010564084894626197, 0.004156422944312888, -0.0015135724506312532,
        0.0005122859561685758, -0.00016176081582589674, 4.781565107550054e-05, -1.3273163656039436e-05,
        3.4702513081376785e-06, -8.568720264695455e-07, 2.0032947535521353e-07, -4.445059128796328e-08,
        9.381537386495773e-09, -1.8872497517228294e-09, 3.625590281552117e-10, -6.663489723502027e-11,
        1.1736186298890901e-11, -1.9839743977649436e-12, 3.223793365945575e-13, -5.042185504727912e-14,
        7.600684294735408e-15, -1.1055969477353862e-15, 1.5536319577362005e-16, -2.111421214358166e-17,
    ),
)
"""Chebyshev coefficients of exp(-x) I0(x) and exp(-x) I1(x) / x for x in [0, 8]; of arguments x / 4 - 1."""

BEYOND: tuple[tuple[float, ...], ...] = (
    (
        0.8044904110141088, 0.0033691164782556943, 6.889758346916825e-05, 2.8913705208347567e-06,
        2.0489185894690638e-07, 2.266668990498178e-08, 3.3962320257083865e-09, 4.94060238822497e-10,
        1.1889147107846439e-11, -3.1499165279632416e-11, -1.3215811840447713e-11, -1.7941785315068062e-12,
        7.180124451383666e-13, 3.8527783827421426e-13, 1.54008621752141e-14, -4.150569347287222e-14,
        -9.554846698828307e-15, 3.8116806693526224e-15, 1.7725601330565263e-15, -3.425485619677219e-16,
        -2.8276239805165836e-16, 3.461222867697461e-17, 4.46562142029676e-17, -4.830504485944182e-18,
        -7.233180487874754e-18,
    ),
    (
        0.7785762350182801, -0.009761097491361469, -0.00011058893876262371, -3.882564808877691e-06,
        -2.512236237870209e-07, -2.6314688468895196e-08, -3.835380385964237e-09, -5.589743462196584e-10,
        -1.8974958123505413e-11, 3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
        -7.198551776245908e-13, -4.0835511110921974e-13, -2.1015418427726643e-14, 4.272440016711951e-14,
        1.0420276984128802e-14, -3.8144030724370075e-15, -1.8803547755107825e-15, 3.3082023109209285e-16,
        2.96262899764595e-16, -3.209525921993424e-17, -4.6503053684893586e-17, 4.414348323071708e-18,
        7.517296310842105e-18,
    ),
)
"""Chebyshev coefficients of exp(-x) sqrt(x) I0(x) and exp(-x) sqrt(x) I1(x) for x above 8; of arguments 16 / x - 1."""
# fmt: on


def _chebyshev(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluates a Chebyshev series by Clenshaw's recurrence."""
    now, before = torch.zeros_like(x), torch.zeros_like(x)
    for coefficient in coefficients[:0:-1]:
        now, before = (x + x) * now - before + coefficient, now
    return x * now - before + 0.5 * coefficients[0]


def _scaled_bessel(x: Tensor, order: int) -> Tensor:
    """Computes exp(-|x|) I(x)."""
    size = x.abs()
    near = _chebyshev(torch.where(size > NEAR_BOUND, NEAR_BOUND, size) / 4 - 1, NEAR[order])
    far = torch.where(size < NEAR_BOUND, NEAR_BOUND, size)
    beyond = _chebyshev(16 / far - 1, BEYOND[order]) / far.sqrt()
    if order:
        near, beyond = near * x, torch.copysign(beyond, x)
    return torch.where(size <= NEAR_BOUND, near, beyond)


def _bessel(order: int, scaled: bool) -> Callable[[Tensor], Tensor]:
    def function(input: Tensor) -> Tensor:
        x = floating(input)
        factor: Any = 1.0 if scaled else x.abs().exp()
        value, other = (_scaled_bessel(x, which) * factor for which in (order, 1 - order))
        slope = other - value * x.sign() if scaled else other
        if order:
            is_apart = x.abs() > torch.finfo(x.dtype).eps
            slope = torch.where(is_apart, slope - value / torch.where(is_apart, x, 1.0), 0.5)
        return with_gradient(value, x, slope)

    return function


for _order in (0, 1):
    composition(f"i{_order}", f"modified_bessel_i{_order}")(_bessel(_order, scaled=False))
    composition(f"i{_order}e")(_bessel(_order, scaled=True))


@composition("spherical_bessel_j0")
def spherical_bessel_j0(input: Tensor) -> Tensor:
    """Computes sin(x) / x; near 0 the first terms of its series."""
    x = floating(input)
    square = x * x
    series = _polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(7)])
    near = x.abs() < 0.5
    far = torch.where(near | x.isinf(), 1.0, x)
    return torch.where(x.isinf(), 0.0, torch.where(near, series, far.sin() / far))
