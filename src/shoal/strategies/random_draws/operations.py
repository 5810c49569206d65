"""torch's random operations, computed from the numbers of a site.

All other random functions of torch call one of `REPLACED`. Autograd runs before them, so a replaced
operation has the gradient of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.util.errors import StepError


class Numbers(Protocol):
    """Random numbers for the elements of a tensor."""

    def below(self, limit: float, tensor: Tensor) -> Tensor:
        """Return for each element of `tensor` whether its number is below `limit`."""
        ...

    def uniform(self, tensor: Tensor, dtype: torch.dtype | None = None, each: int = 1) -> Tensor:
        """Return numbers in [0, 1): `each` of them per element, in a last dimension if not 1."""
        ...


class Constants:
    """The same number for each element, and dropout keeps all: `Numbers` that no split changes."""

    def below(self, limit: float, tensor: Tensor) -> Tensor:
        """Return True for each element, unless `limit` is 0."""
        return torch.full(tensor.shape, limit > 0, device=tensor.device)

    def uniform(self, tensor: Tensor, dtype: torch.dtype | None = None, each: int = 1) -> Tensor:
        """Return 0.5 for each element, `each` times in a last dimension if not 1."""
        double = (dtype or tensor.dtype) == torch.float64
        shape = tensor.shape if each == 1 else (*tensor.shape, each)
        dtype = torch.float64 if double else torch.float32
        return torch.full(shape, 0.5, dtype=dtype, device=tensor.device)


CONSTANT: ContextVar[bool] = ContextVar("whether draws are constants", default=False)

SiteOf = Callable[..., Numbers | None]
"""Called with a tensor and a generator: the numbers of this draw, or None if torch draws."""
Original = Callable[[], Any]
"""Draws as torch does."""


def _bernoulli_(
    site_of: SiteOf, original: Original, tensor: Tensor, p: Any = 0.5, *, generator: Any = None
) -> Any:
    site = site_of(tensor, generator)
    if site is None:
        return original()
    if isinstance(p, Tensor):
        p = p.to(tensor.device)
        return tensor.copy_(site.uniform(tensor, p.dtype) < p)
    return tensor.copy_(site.below(p, tensor))


def _uniform_(
    site_of: SiteOf,
    original: Original,
    tensor: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: Any = None,
) -> Any:
    if tensor.is_complex():
        torch.view_as_real(tensor).uniform_(low, high, generator=generator)
        return tensor
    site = site_of(tensor, generator)
    if site is None:
        return original()
    found = site.uniform(tensor)
    if tensor.dtype in (torch.bfloat16, torch.float16):
        last = torch.finfo(tensor.dtype).eps / 2  # the numbers below 1 of this dtype; 1 is excluded
        found = found.div_(last).floor_().mul_(last)
    return tensor.copy_(found.mul_(high - low).add_(low))


def _normal_(
    site_of: SiteOf,
    original: Original,
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: Any = None,
) -> Any:
    if tensor.is_complex():  # the variance is that of both parts together
        torch.view_as_real(tensor).normal_(0.0, std / 2**0.5, generator=generator)
        return tensor.add_(mean) if mean else tensor
    site = site_of(tensor, generator)
    if site is None:
        return original()
    return tensor.copy_(_normals(site, tensor).mul_(std).add_(mean))


def _normals(site: Numbers, tensor: Tensor) -> Tensor:
    """Return standard normal numbers (Box and Muller 1958, one number from two)."""
    first, second = site.uniform(tensor, each=2).unbind(-1)
    radius = torch.log1p(-first).mul_(-2).sqrt_()
    return torch.cos(second * (2 * torch.pi)).mul_(radius)


def _exponential_(
    site_of: SiteOf, original: Original, tensor: Tensor, rate: float = 1.0, *, generator: Any = None
) -> Any:
    site = site_of(tensor, generator)
    if site is None:
        return original()
    found = torch.log1p(-site.uniform(tensor)).neg_()
    least = 2.0**-54 if found.dtype == torch.float64 else 2.0**-25  # never 0, as torch promises
    return tensor.copy_(found.clamp_(min=least).div_(rate))


def _random_(
    site_of: SiteOf, original: Original, tensor: Tensor, *bounds: int | None, generator: Any = None
) -> Any:
    site = site_of(tensor, generator)
    if site is None:
        return original()
    low, high = bounds if len(bounds) == 2 else (0, *bounds, None)[:2]
    if high is None:
        high = _end(tensor.dtype)
    count = high - (low or 0)
    if count <= 2**32:
        found = site.uniform(tensor, torch.float64).mul_(count).floor_()
        return tensor.copy_(found.add_(low or 0))
    upper, lower = site.uniform(tensor, torch.float64, each=2).mul_(2.0**32).long().unbind(-1)
    bits = (upper << 31) | (lower >> 1)  # 63 random bits
    return tensor.copy_((bits % count if count < 2**63 else bits) + (low or 0))


def _end(dtype: torch.dtype) -> int:
    """Return the number after the largest that `random_` draws for a dtype."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def _native_dropout(
    site_of: SiteOf, original: Original, tensor: Tensor, p: float, train: bool | None
) -> Any:
    site = site_of(tensor, None) if train is not False else None
    if site is None:
        return original()
    mask = site.below(1 - p, tensor)
    return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _rrelu_with_noise(
    site_of: SiteOf,
    original: Original,
    tensor: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
    *,
    out: Tensor | None = None,
) -> Any:
    site = site_of(tensor, generator) if training else None
    if site is None:
        return original()
    slope = site.uniform(tensor).mul_(upper - lower).add_(lower).to(tensor.dtype)
    noise.copy_(torch.where(tensor <= 0, slope, 1.0))
    return tensor * noise if out is None else torch.mul(tensor, noise, out=out)


def _rrelu_with_noise_(site_of: SiteOf, original: Original, tensor: Tensor, *arguments: Any) -> Any:
    return _rrelu_with_noise(site_of, original, tensor, *arguments, out=tensor)


def _checked(numbers: Callable[..., Tensor]) -> Callable[..., Any]:
    """Let torch check the arguments and create the result, and overwrite it with `numbers`."""

    def replaced(
        site_of: SiteOf, original: Original, *arguments: Any, generator: Any = None, **_: Any
    ) -> Any:
        found = original()
        generators = [generator, *(each for each in arguments if isinstance(each, torch.Generator))]
        site = site_of(found, next(filter(None, generators), None))
        return found if site is None else found.copy_(numbers(site, found, *arguments))

    return replaced


def _bernoulli(site: Numbers, found: Tensor, p: Tensor) -> Tensor:
    return torch.lt(site.uniform(found, p.dtype), p)


def _geometric(site: Numbers, found: Tensor, tensor: Tensor, p: float) -> Tensor:
    u = site.uniform(found, torch.float64)
    return (torch.log1p(-u) / torch.log1p(torch.tensor(-p, dtype=u.dtype))).ceil_().clamp_(min=1)


def _log_normal(
    site: Numbers, found: Tensor, tensor: Tensor, mean: float = 1.0, std: float = 2.0
) -> Tensor:
    return _normals(site, found).mul_(std).add_(mean).exp_()


def _cauchy(
    site: Numbers, found: Tensor, tensor: Tensor, median: float = 0.0, sigma: float = 1.0
) -> Tensor:
    return site.uniform(found).sub_(0.5).mul_(torch.pi).tan_().mul_(sigma).add_(median)


def _normal(site: Numbers, found: Tensor, mean: Any, std: Any = 1.0) -> Tensor:
    return _normals(site, found).mul(std).add(mean)


def _poisson(site: Numbers, found: Tensor, rates: Tensor, _: Any = None) -> Tensor:
    """Return the least counts whose cumulative probabilities exceed uniform numbers."""
    u, rates = site.uniform(found, torch.float64), rates.double()
    low, high = torch.zeros_like(u), (rates + 12 * rates.sqrt() + 40).floor_()
    for _ in range(int(high.max()).bit_length()):
        middle = ((low + high) / 2).floor_()
        enough = torch.special.gammaincc(middle + 1, rates) > u
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return high


def _gamma(site: Numbers, found: Tensor, shapes: Tensor, _: Any = None) -> Tensor:
    """Invert the distribution function for shape + 1 (Devroye 1986, II.2), and reduce it by one.

    The second step, times u**(1 / shape) (Stuart 1962), is exact relative to small numbers too.
    """
    u, v = site.uniform(found, torch.float64, each=2).unbind(-1)
    shapes = shapes.double()
    raised = shapes + 1
    low, high = torch.zeros_like(u), raised + 12 * raised.sqrt() + 50
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.gammainc(raised, middle) < u
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    reduced: Tensor = high * (1 - v) ** (1 / shapes)
    return reduced.clamp_(min=torch.finfo(found.dtype).tiny)


def _dirichlet(site: Numbers, found: Tensor, shapes: Tensor, _: Any = None) -> Tensor:
    gammas = _gamma(site, found, shapes)
    return gammas / gammas.sum(-1, keepdim=True)


def _multinomial(
    site_of: SiteOf,
    original: Original,
    weights: Tensor,
    count: int,
    replacement: bool = False,
    *,
    generator: Any = None,
    out: Tensor | None = None,
) -> Any:
    if count == 1 or not replacement:
        return original()  # which calls `exponential_`
    return _with_replacement(site_of, original, weights, generator=generator)


@_checked
def _with_replacement(site: Numbers, found: Tensor, weights: Tensor) -> Tensor:
    sums = weights.double().cumsum(-1)
    # Of (0, total]: the first sum that is not below never belongs to a class of weight 0.
    points = sums[..., -1:] * (1 - site.uniform(found, torch.float64))
    return torch.searchsorted(sums, points)


def _randperm(
    site_of: SiteOf, original: Original, count: int, *, generator: Any = None, out: Tensor
) -> Any:
    found = original()
    site = site_of(found, generator, of_step=True)
    return found if site is None else found.copy_(site.uniform(found, torch.float64).argsort())


def _binomial(
    site_of: SiteOf, original: Original, count: Tensor, p: Tensor, generator: Any = None
) -> Any:
    if site_of(count, generator) is None:
        return original()
    raise StepError(
        given="torch.binomial in the forward of a parallelized model",
        found="its random numbers can't belong to samples",
        fix="use torch.binomial(…, generator=…), which draws by rank, or add up torch.bernoulli draws",
    )


def attention(
    is_drawing: Callable[[], bool],
    original: Original,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> Any:
    """Compute attention whose dropout belongs to samples by torch's kernel that calls `dropout`.

    The fused kernels of GPUs draw by themselves. In code that is compiled, `graphs.py` replaces them.
    """
    if dropout_p > 0 and not torch.compiler.is_compiling() and is_drawing():
        with sdpa_kernel(SDPBackend.MATH):
            return original()
    return original()


REPLACED: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _bernoulli_,
    "bernoulli_.Tensor": _bernoulli_,
    "bernoulli.out": _checked(_bernoulli),
    "uniform_": _uniform_,
    "normal_": _normal_,
    "exponential_": _exponential_,
    "random_": _random_,
    "random_.from": _random_,
    "random_.to": _random_,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu_with_noise,
    "rrelu_with_noise.out": _rrelu_with_noise,
    "rrelu_with_noise_": _rrelu_with_noise_,
    "geometric_": _checked(_geometric),
    "log_normal_": _checked(_log_normal),
    "cauchy_": _checked(_cauchy),
    "normal.Tensor_float": _checked(_normal),
    "normal.Tensor_float_out": _checked(_normal),
    "normal.float_Tensor": _checked(_normal),
    "normal.float_Tensor_out": _checked(_normal),
    "normal.Tensor_Tensor": _checked(_normal),
    "normal.Tensor_Tensor_out": _checked(_normal),
    "poisson": _checked(_poisson),
    "_standard_gamma": _checked(_gamma),
    "_sample_dirichlet": _checked(_dirichlet),
    "multinomial": _multinomial,
    "multinomial.out": _multinomial,
    "randperm.generator_out": _randperm,
    "binomial": _binomial,
}
"""Called with `site_of`, `original` and the arguments of the operation."""
