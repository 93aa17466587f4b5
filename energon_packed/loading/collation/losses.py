"""Losses over the samples of a row: log probabilities or scores of samples in, a value for each pair or sample out.

| data | values of the samples | loss |
|---|---|---|
| pairs: `chosen` and `rejected` of a group | `batch.sample_logps(logits)` | `dpo_loss` |
| samples with the label 1 (desired) or 0 | `batch.sample_logps(logits)` | `kto_loss` |
| pairs, or lists with a score for each sample | scores at the last tokens, `batch.last_tokens` | `reward_loss` |

The mean of the values is the loss of a row. In a step of several rows, divide the sum of each row by the number of
values in the step: PackedTrainer does so with `loss=dpo_loss`.
"""

import torch

from energon_packed.errors import BatchError
from energon_packed.loading.collation.batch import PackedBatch

CHOSEN, REJECTED = "chosen", "rejected"
_PREFERENCE = {CHOSEN: 1.0, REJECTED: 0.0}


def preference_pairs(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the pairs of samples of a group, one of which is preferred to the other.

    A chosen sample is preferred to the rejected samples of its group. In a group of samples with other roles, a sample
    is preferred to those with a smaller label.

    Returns:
        int64 (P,), indices of the preferred samples, and int64 (P,), of the others; on the device of `batch.groups`.
    """
    if batch.groups is None or not batch.has_targets:
        none = torch.zeros(0, dtype=torch.long, device=batch.input_ids.device)
        return none, none
    count, device = batch.num_samples, batch.groups.device
    unknown = torch.full((count,), torch.nan, device=device)
    labels = batch.sample_labels if batch.sample_labels is not None and batch.sample_labels.ndim == 1 else unknown
    roles = batch.roles or [None] * count
    ranks = torch.tensor([_PREFERENCE.get(role or "", torch.nan) for role in roles], device=device)
    values = torch.where(ranks.isnan(), labels, ranks)
    # Ranks of roles and labels are not comparable, and comparisons with NaN are false.
    is_same_kind = ranks.isnan()[:, None] == ranks.isnan()
    is_pair = (batch.groups[:, None] == batch.groups) & is_same_kind & (values[:, None] > values)
    preferred, other = is_pair.nonzero().unbind(1)
    return preferred, other


def dpo_loss(
    batch: PackedBatch,
    logps: torch.Tensor,
    ref_logps: torch.Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss of direct preference optimization of each pair of a row.

    -logsigmoid(beta * (logp(chosen) - ref_logp(chosen) - logp(rejected) + ref_logp(rejected))), equation 7 of R.
    Rafailov et al., "Direct Preference Optimization", 2023; with smoothing as in E. Mitchell, "A note on DPO with
    noisy preferences", 2023.

    Args:
        batch: the row, with `groups` and `roles` or `sample_labels`.
        logps: (S,), log probability of the targets of each sample, `batch.sample_logps(logits)`.
        ref_logps: (S,), of the reference model.
        beta: factor of the difference.
        label_smoothing: probability that the labels of a pair are exchanged, 0 to 0.5.

    Returns:
        (P,), one for each pair as `preference_pairs` lists them; empty without a pair.

    Raises:
        BatchError: without `ref_logps`.

    Examples:
        >>> import torch
        >>> chosen, rejected = (dict(group="a", role=role) for role in ("chosen", "rejected"))
        >>> tokens = {"input_ids": np.ones(2), "labels": np.ones(2)}
        >>> pair = [EncodedSample(**tokens, **own) for own in (chosen, rejected)]
        >>> batch = PaddingFreeCollator().collate(pair)
        >>> dpo_loss(batch, torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]), beta=1.0)
        tensor([0.1269])
    """
    ratios = logps - _reference("dpo_loss", ref_logps).to(logps.device)
    preferred, other = preference_pairs(batch)
    margins = beta * (ratios[preferred.to(logps.device)] - ratios[other.to(logps.device)])
    log_sigmoid = torch.nn.functional.logsigmoid
    return -(1 - label_smoothing) * log_sigmoid(margins) - label_smoothing * log_sigmoid(-margins)


def kto_loss(
    batch: PackedBatch,
    logps: torch.Tensor,
    ref_logps: torch.Tensor | None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Loss of Kahneman-Tversky optimization of each sample of a row that has a label.

    weight * (1 - sigmoid(beta * (ratio - kl))) for the label 1 and weight * (1 - sigmoid(beta * (kl - ratio))) for the
    label 0, with ratio = logp - ref_logp: equations 7 and 8 of K. Ethayarajh et al., "KTO: Model Alignment as Prospect
    Theoretic Optimization", 2024.

    Args:
        batch: the row, with `sample_labels` (S,).
        logps, ref_logps: as for `dpo_loss`.
        beta: factor of the ratio.
        desirable_weight: weight of samples with a label above 0.
        undesirable_weight: weight of samples with the label 0.
        kl: estimate of the divergence from the reference model, at least 0: the mean of the ratios of answers to the
            prompts of other samples. With 0, this is the loss APO-zero without pairs (K. D'Oosterlinck et al., 2024).

    Returns:
        (K,), of the K samples with a label, in their order; empty without one.

    Raises:
        BatchError: without `ref_logps`.

    Examples:
        >>> import torch
        >>> tokens = {"input_ids": np.ones(2), "labels": np.ones(2)}
        >>> samples = [EncodedSample(**tokens, label=(label,)) for label in (1.0, 0.0)]
        >>> batch = PaddingFreeCollator().collate(samples)
        >>> kto_loss(batch, torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]), beta=1.0)
        tensor([0.2689, 0.2689])
    """
    ratios = logps - _reference("kto_loss", ref_logps).to(logps.device)
    if batch.sample_labels is None or batch.sample_labels.ndim != 1 or not batch.has_targets:
        return ratios[:0]
    labels = batch.sample_labels.to(logps.device)
    is_desired = labels > 0
    sign = torch.where(is_desired, 1.0, -1.0).to(ratios.dtype)
    weight = torch.where(is_desired, desirable_weight, undesirable_weight).to(ratios.dtype)
    return (weight * (1 - torch.sigmoid(beta * sign * (ratios - kl))))[~labels.isnan()]


def reward_loss(
    batch: PackedBatch, scores: torch.Tensor, *, center: float = 0.0, margins: bool = False
) -> torch.Tensor:
    """Loss of a reward model of each pair of a row: -logsigmoid(score(chosen) - score(rejected) - margin).

    The model of R. Bradley and M. Terry, 1952, as in L. Ouyang et al., "Training language models to follow
    instructions", 2022, equation 1; a list of K ranked samples has all its pairs.

    Args:
        batch: the row, with `groups` and `roles` or `sample_labels`.
        scores: (S,), score of each sample, such as `batch.last_tokens(logits)[:, 0]` of a model for the classification
            of tokens.
        center: factor of (score + score)**2, which keeps the mean of the scores near 0 (J. Eisenstein et al., "Helping
            or Herding?", 2023).
        margins: the margin of a pair is the difference of its labels (H. Touvron et al., "Llama 2", 2023, equation 2);
            by default, it is 0.

    Returns:
        (P,), one for each pair as `preference_pairs` lists them; empty without a pair.

    Examples:
        >>> import torch
        >>> labels = [dict(group="a", label=(score,)) for score in (3.0, 9.0, 5.0)]
        >>> tokens = {"input_ids": np.ones(2), "labels": np.ones(2)}
        >>> ranked = [EncodedSample(**tokens, **own) for own in labels]
        >>> reward_loss(PaddingFreeCollator().collate(ranked), torch.tensor([0.0, 2.0, 1.0]))  # (1, 0), (1, 2), (2, 0)
        tensor([0.1269, 0.3133, 0.3133])
    """
    pairs = [index.to(scores.device) for index in preference_pairs(batch)]
    preferred, other = [scores[index] for index in pairs]
    difference = preferred - other
    if margins and batch.sample_labels is not None:
        labels = batch.sample_labels.to(scores.device)
        difference = difference - (labels[pairs[0]] - labels[pairs[1]])
    return -torch.nn.functional.logsigmoid(difference) + center * (preferred + other) ** 2


def _reference(name: str, ref_logps: torch.Tensor | None) -> torch.Tensor:
    if ref_logps is None:
        raise BatchError(
            f"`{name}` needs `ref_logps`, the log probabilities of the reference model, got None. Pass `ref_model` to "
            "PackedTrainer, or pack records with a column `ref_logprobs`."
        )
    return ref_logps
