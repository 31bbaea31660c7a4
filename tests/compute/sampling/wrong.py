"""Deliberately wrong samplers, each off by one thing: the checks must tell them from ours."""

from __future__ import annotations

import functools

import torch

from minillm.compute.sampling.draws import uniform
from minillm.compute.sampling.processors import probabilities, process_logits
from minillm.compute.sampling.sampler import SamplerOutput, draw, top_logprobs

remembered = functools.cache(uniform)  # it has tests of its own, and the same few thousand numbers will do here


def assemble(
    process=process_logits,
    chances=probabilities,
    number=lambda row: remembered(row.seed, row.sample_index, len(row.output_token_ids)),
    pick=draw,
    best=lambda logits: logits.max(-1).indices,
    report=lambda raw, processed, tokens, wanted: top_logprobs(raw, tokens, wanted),
):
    """A sampler of our parts, or of others in their place."""

    def sampler(logits, rows) -> SamplerOutput:
        raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
        processed = process(raw.clone(), rows)
        tokens = best(processed).tolist()
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            chosen = [rows[i] for i in random]
            drawn = pick(chances(processed[random], chosen), [number(row) for row in chosen])
            for i, token in zip(random, drawn, strict=True):
                tokens[i] = token
        return SamplerOutput(tokens, report(raw, processed, tokens, [row.params.logprobs for row in rows]))

    return sampler


def cut(order=("temperature", "min_p", "top_k", "top_p"), ties=False):
    """probabilities() again, with some steps left out, moved or changed."""

    def one(logit, p):
        for step in order:
            logit = STEPS[step](logit, p, ties)
        return logit.softmax(-1)

    return row_by_row(one)


def row_by_row(one):
    """f(logits [V], params) for each row; equal rows are computed once."""

    def chances(logits, rows):
        done = {}
        keys = [(id(row.params), *values) for row, values in zip(rows, logits.tolist(), strict=True)]
        for key, logit, row in zip(keys, logits, rows, strict=True):
            if key not in done:
                done[key] = one(logit, row.params)
        return torch.stack([done[key] for key in keys])

    return chances


def _temperature(logit, p, ties):
    return logit / p.temperature


def _min_p(logit, p, ties):
    share = logit.softmax(-1)
    return logit.masked_fill(share < p.min_p * share.max() * (1 - 1e-6), float("-inf"))


def _min_p_absolute(logit, p, ties):
    return logit.masked_fill(logit.softmax(-1) < p.min_p, float("-inf"))


def _top_k(logit, p, ties):
    if p.top_k <= 0:
        return logit
    ordered, order = logit.sort(descending=True, stable=True)
    if ties:  # keeps all that equal the k-th
        return logit.masked_fill(logit < ordered[min(p.top_k, len(logit)) - 1], float("-inf"))
    return logit.index_fill(0, order[p.top_k :], float("-inf"))


def _top_p(logit, p, ties):
    ordered, order = logit.sort(descending=True, stable=True)
    running = ordered.double().softmax(-1).cumsum(-1)
    count = min(int((running < p.top_p - 1e-6).sum()) + 1, len(logit)) if p.top_p < 1 else len(logit)
    if ties:
        return logit.masked_fill(logit < ordered[count - 1], float("-inf"))
    return logit.index_fill(0, order[count:], float("-inf"))


STEPS = {
    "temperature": _temperature,
    "min_p": _min_p,
    "min_p_absolute": _min_p_absolute,
    "top_k": _top_k,
    "top_p": _top_p,
}


def top_p_by(kept):
    """top-p alone, with another rule for how many of the ranked tokens stay: kept(running sums, top_p)."""

    def one(logit, p):
        ordered, order = (logit / p.temperature).sort(descending=True, stable=True)
        return logit.index_fill(0, order[kept(ordered.softmax(-1).cumsum(-1), p.top_p) :], float("-inf")).softmax(-1)

    return row_by_row(one)


def first_rows_parameters(logits, rows):
    return probabilities(logits, [rows[0]] * len(rows))


def order_by_last(logits, rows):
    """Of equals the higher ids stay."""
    return probabilities(logits.flip(-1), rows).flip(-1)


class GlobalGenerator:
    """One stream for everybody: what a row gets depends on who asked before."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, row) -> float:
        return torch.rand((), generator=self.generator, dtype=torch.float64).item()


def last_of_equals(logits):
    return logits.shape[-1] - 1 - logits.flip(-1).max(-1).indices


# -- drawing from probabilities -------------------------------------------------------------------------------------


def _search(chances, u, right=True):
    return torch.searchsorted(chances.double().cumsum(-1), u, right=right)[:, 0].tolist()


def _column(draws):
    return torch.tensor(draws, dtype=torch.float64)[:, None]


def draw_from_the_left(chances, draws):
    """u = 0 finds the first token, whatever its probability."""
    return _search(chances, _column(draws), right=False)


def draw_unscaled(chances, draws):
    """Probabilities of float32 end a little below 1 or above."""
    return _search(chances, _column(draws))


def draw_clamped(chances, draws):
    """u beyond the sum falls on the last id, whatever its probability."""
    return [min(token, chances.shape[-1] - 1) for token in _search(chances, _column(draws))]


def draw_short(chances, draws):
    """u never comes near 1, so the last tokens are seldom drawn or never."""
    return _search(chances, _column(draws) * 0.9)


def draw_backwards(chances, draws):
    """A fair draw, but not the first token whose running sum exceeds u."""
    return [chances.shape[-1] - 1 - token for token in draw(chances.flip(-1), draws)]


# -- penalties ------------------------------------------------------------------------------------------------------


def process(
    prompt_counts=False,
    presence_each_time=False,
    frequency_once=False,
    divide_always=False,
    repetition_each_time=False,
    repetition_of_output_only=False,
    bias_last=False,
    stop_tokens_stay=False,
    eos_stays=False,
    off_by_one=False,
    masks=True,
):
    """process_logits() again, token by token, with one rule broken."""

    def processed(logits, rows):
        for logit, row in zip(logits, rows, strict=True):
            p = row.params
            if p.allowed_token_ids is not None and masks:
                for i in set(range(len(logit))) - set(p.allowed_token_ids):
                    logit[i] = float("-inf")
            if len(row.output_token_ids) - off_by_one < p.min_tokens:
                banned = [] if eos_stays else [*row.eos_token_ids]
                for i in banned if stop_tokens_stay else [*banned, *p.stop_token_ids]:
                    logit[i] = float("-inf")
            if not bias_last:
                _bias(logit, p)
            seen = row.output_token_ids if repetition_of_output_only else row.prompt_token_ids + row.output_token_ids
            for i in seen if repetition_each_time else set(seen):
                shrink = logit[i] > 0 or divide_always
                logit[i] *= 1 / p.repetition_penalty if shrink else p.repetition_penalty
            counted = row.prompt_token_ids + row.output_token_ids if prompt_counts else row.output_token_ids
            for i in set(counted):
                times = counted.count(i)
                logit[i] -= p.presence_penalty * (times if presence_each_time else 1)
                logit[i] -= p.frequency_penalty * (1 if frequency_once else times)
            if bias_last:
                _bias(logit, p)
        return logits

    return processed


def _bias(logit, p):
    for i, bias in (p.logit_bias or {}).items():
        logit[i] += bias


# -- log-probabilities ----------------------------------------------------------------------------------------------


def report_after_penalties(raw, processed, tokens, wanted):
    return top_logprobs(processed, tokens, wanted)


def report_at_half_temperature(raw, processed, tokens, wanted):
    return top_logprobs(raw / 0.5, tokens, wanted)


def report_logits(raw, processed, tokens, wanted):
    for entries in (result := top_logprobs(raw, tokens, wanted)):
        for entry in entries or []:
            entry.logprob += 1.0
    return result


def report_sorted(raw, processed, tokens, wanted):
    """The most likely first, instead of the sampled one."""
    result = top_logprobs(raw, tokens, wanted)
    return [entries and sorted(entries, key=lambda entry: entry.rank) for entries in result]


def report_ranks_from_zero(raw, processed, tokens, wanted):
    for entries in (result := top_logprobs(raw, tokens, wanted)):
        for entry in entries or []:
            entry.rank -= 1
    return result


def report_equal_ranks(raw, processed, tokens, wanted):
    """Equals share a rank: one more than the number of strictly more likely tokens."""
    result = top_logprobs(raw, tokens, wanted)
    for logits, entries in zip(raw, result, strict=True):
        for entry in entries or []:
            entry.rank = int((logits > logits[entry.token_id]).sum()) + 1
    return result


def report_one_length(raw, processed, tokens, wanted):
    """Every row gets what the greediest asks for."""
    most = max((k for k in wanted if k is not None), default=None)
    return top_logprobs(raw, tokens, [None if k is None else most for k in wanted])
