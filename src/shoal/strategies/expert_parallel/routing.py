"""Layers of routers that count the tokens of each expert over the whole batch.

Means over micro-batches or ranks are not the values of the batch, because these losses and limits are
not sums over samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.data.coupling.layers import Coupled
from shoal.util.arguments import check_integer, check_number
from shoal.util.errors import StepError


class BalanceLoss(Coupled):
    """The load-balancing loss of the Switch Transformer (Fedus et al. 2022, section 2.2).

    For N experts, it is `N · Σ f_i · P_i`, with the fraction `f_i` of the choices of expert i, and its
    mean probability `P_i`, over all tokens of the batch, on all ranks, or of groups of `statistics`
    consecutive samples (see `parallelize`). Create it in the model, and call it once for each router.

    Examples:
        >>> balance = shoal.BalanceLoss()
        >>> probabilities = torch.tensor([[[0.5, 0.5], [0.75, 0.25]]])  # one sample of two tokens
        >>> balance(probabilities, torch.tensor([[[0], [0]]])).item()  # 2 · 1.0 · 0.625 for each token
        2.5
    """

    def forward(self, probabilities: Tensor, index: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return this loss times the number of tokens: the part of the samples at hand.

        Add it to the sum of a loss that is divided by the number of tokens.

        Args:
            probabilities: Probabilities of the experts, of shape (samples, tokens, experts).
            index: Chosen experts, of shape (samples, tokens, choices).
            mask: Tokens that count, of shape (samples, tokens): those that the loss counts. Default:
                None, all.

        Returns:
            A scalar, which adds up over micro-batches and ranks.
        """
        chosen = _choices(index, probabilities.shape[-1]).sum(2).to(probabilities)
        shapes = [tuple(each.shape[:2]) for each in (probabilities, index, mask) if each is not None]
        if len({*shapes}) > 1 or probabilities.dim() != 3:
            raise StepError(
                given=f"shoal.BalanceLoss with probabilities of shape {tuple(probabilities.shape)}",
                found="the chosen experts, or the mask, are of other samples and tokens: "
                + ", ".join(map(str, shapes[1:])),
                fix="pass probabilities of shape (samples, tokens, experts), an index of shape "
                "(samples, tokens, choices) and a mask of shape (samples, tokens)",
            )
        groups = self.groups(probabilities)
        if mask is not None:
            chosen, probabilities = chosen * mask.unsqueeze(-1), probabilities * mask.unsqueeze(-1)
        counts = groups.sum(chosen.sum(1))
        fractions = counts / counts.sum(1, keepdim=True).clamp(min=1)
        loss: Tensor = (groups.expand(fractions) * probabilities.sum(1)).sum()
        return loss * probabilities.shape[-1]


class ExpertCapacity(Coupled):
    """Drops choices of an expert beyond its capacity (Lepikhin et al. 2021, GShard).

    The capacity of each of N experts is `factor · choices / N` times the number of tokens in the batch,
    on all ranks, or in groups of `statistics` consecutive samples (see `parallelize`). The first
    choices in the order of samples and tokens are kept, so the same ones at any number of ranks and
    micro-batches.

    Args:
        experts: Number of experts.
        factor: Capacity factor: 1.0 is enough for equal loads. Default: 1.25.

    Examples:
        >>> capacity = shoal.ExpertCapacity(experts=2, factor=1.0)
        >>> capacity(torch.tensor([[[0], [0], [0], [1]]])).flatten()  # of four tokens, two each
        tensor([0, 0, 2, 1])
    """

    def __init__(self, experts: int, factor: float = 1.25) -> None:
        super().__init__()
        check_integer(StepError, "shoal.ExpertCapacity", "experts", experts, 1, usual=8)
        check_number(StepError, "shoal.ExpertCapacity", "factor", factor, above=True, usual=1.25)
        self.experts = experts
        self.factor = factor

    def forward(self, index: Tensor) -> Tensor:
        """Return the choices, with the number of experts in place of those that are dropped.

        Args:
            index: Chosen experts, of shape (samples, tokens, choices).

        Returns:
            Tensor of the same shape.
        """
        groups = self.groups(index)
        choices = _choices(index, self.experts).flatten(1, 2)
        before = groups.before(choices.sum(1)).unsqueeze(1) + choices.cumsum(1) - choices
        # A limit of 11 that is rounded to 11.000000000000002 would let a twelfth choice pass.
        limits = self.factor * (1 - 1e-12) / self.experts * groups.sum(choices.sum((1, 2)).double())
        kept = (before * choices).sum(-1) < groups.expand(limits).unsqueeze(1)
        return index.where(kept.view_as(index) & (index >= 0), self.experts)


class BalancingBias(Coupled):
    """A bias of the router that balances the load of experts without a loss (Wang et al. 2024).

    Choose experts by their scores plus this bias, and weight them by their scores alone. After each
    optimizer step, it grows by `rate` for experts with fewer tokens than the mean over the batch, and
    falls by `rate` for the others.

    Args:
        experts: Number of experts.
        rate: Change per step. Default: 1e-3.

    Attributes:
        bias: Buffer of shape (experts,).

    Examples:
        >>> balancing = shoal.BalancingBias(experts=2, rate=0.5)
        >>> balancing.count(torch.tensor([[[0], [0]]]))  # outside a step, it changes the bias now
        >>> balancing.bias
        tensor([-0.5000,  0.5000])
    """

    bias: Tensor

    def __init__(self, experts: int, rate: float = 1e-3) -> None:
        super().__init__()
        check_integer(StepError, "shoal.BalancingBias", "experts", experts, 1, usual=8)
        check_number(StepError, "shoal.BalancingBias", "rate", rate, above=True, usual=1e-3)
        self.rate = rate
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, scores: Tensor) -> Tensor:
        """Return the scores plus the bias.

        Args:
            scores: Scores of the experts, of shape (…, experts).

        Returns:
            Tensor of the same shape.
        """
        return scores + self.bias

    def count(self, index: Tensor) -> None:
        """Count the chosen experts of the samples at hand, in training.

        Args:
            index: Chosen experts, of shape (samples, tokens, choices).
        """
        if self.training:
            groups = self.groups(index)
            groups.update(self._change, groups.sum(_choices(index, len(self.bias)).sum((1, 2))))

    def _change(self, counts: Tensor) -> None:
        counts = counts.double()
        self.bias.add_(torch.sign(counts.mean() - counts).to(self.bias), alpha=self.rate)


def _choices(index: Tensor, experts: int) -> Tensor:
    """Return which expert each choice is, of shape (samples, tokens, choices, experts), 0 for none."""
    if index.dim() != 3 or index.is_floating_point():
        raise StepError(
            given=f"chosen experts of shape {tuple(index.shape)} and {index.dtype}".replace(
                "torch.", ""
            ),
            found="samples are counted, and a row of this tensor may be a token",
            fix="pass integers of shape (samples, tokens, choices), before the tokens of all samples "
            "are flattened",
        )
    known = (index >= 0) & (index < experts)
    return F.one_hot(index.long().where(known, experts), experts + 1)[..., :experts]
