"""The rule "Same tokens": an engine in float32 against transformers, float32, one prompt at a time, greedy.

Per generated step, while ids agree, the five best log-probabilities are within ε of the reference's. Ids are equal up
to the first step whose reference top-two margin is under 2ε: from there on rounding alone may decide, so what follows
is cut away. A run counts if at least 1,000 steps were compared and at most 10 % of all were cut.

There are two ways to the reference, the same up to the first step where ids differ, beyond which nothing is compared:

``greedy``   transformers generates by itself, token by token.
``follow``   transformers reads prompt and engine's output in one forward pass; row by row, its most likely token is
             the one it would have generated after the same prefix. For models on which the other way takes minutes.

Either is computed once and cached, by a hash of the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers

from minillm.core.outputs import CompletionOutput
from minillm.core.sampling_params import SamplingParams
from minillm.llm import LLM

TOP = 5
LEAST_COMPARED, MOST_CUT = 1000, 0.1
# Prompts that lead SmolLM2 to no near-tie: at its ε one in three does, and loses the rest of its steps.
LENGTHS = (1, 2, 7, 48, 64, 129, 200, 257, 400)
STEPS = 120

Step = list[tuple[int, float]]  # the five most likely tokens after some prefix, best first

# Jane Austen, Pride and Prejudice (1813), chapter 1.
TEXT = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.

However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so
well fixed in the minds of the surrounding families, that he is considered as the rightful property of some one or other
of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"

Mr. Bennet replied that he had not.

"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."

Mr. Bennet made no answer.

"Do not you want to know who has taken it?" cried his wife impatiently.

"You want to tell me, and I have no objection to hearing it."

This was invitation enough.

"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune from the north of
England; that he came down on Monday in a chaise and four to see the place, and was so much delighted with it that he
agreed with Mr. Morris immediately; that he is to take possession before Michaelmas, and some of his servants are to be
in the house by the end of next week."

"What is his name?"

"Bingley."

"Is he married or single?"

"Oh! single, my dear, to be sure! A single man of large fortune; four or five thousand a year. What a fine thing for our
girls!"

"How so? how can it affect them?"

"My dear Mr. Bennet," replied his wife, "how can you be so tiresome! You must know that I am thinking of his marrying
one of them."

"Is that his design in settling here?"

"Design! nonsense, how can you talk so! But it is very likely that he may fall in love with one of them, and therefore
you must visit him as soon as he comes."

"I see no occasion for that. You and the girls may go, or you may send them by themselves, which perhaps will be still
better, for as you are as handsome as any of them, Mr. Bingley might like you the best of the party."

"My dear, you flatter me. I certainly have had my share of beauty, but I do not pretend to be any thing extraordinary
now. When a woman has five grown up daughters, she ought to give over thinking of her own beauty."
"""


@dataclass
class Score:
    """Steps of one run."""

    compared: int
    total: int

    def __add__(self, other: Score) -> Score:
        return Score(self.compared + other.compared, self.total + other.total)

    def assert_enough(self) -> None:
        assert self.compared >= LEAST_COMPARED, f"only {self.compared} steps compared"
        cut = self.total - self.compared
        assert cut <= MOST_CUT * self.total, f"{cut} of {self.total} steps cut away"


def compare(output: CompletionOutput, reference: list[Step], epsilon: float) -> Score:
    """One prompt's steps against the reference's. AssertionError for the first that breaks the rule."""
    compared, clear = 0, True
    for step, (token, position, best) in enumerate(zip(output.token_ids, output.logprobs, reference, strict=True)):
        _compare_logprobs(position, best, epsilon, step)
        clear = clear and best[0][1] - best[1][1] >= 2 * epsilon
        if clear:
            assert token == best[0][0], f"step {step}: token {token}, the reference has {best[:2]}"
            compared += 1
        elif token != best[0][0]:
            break
    return Score(compared, len(output.token_ids))


def _compare_logprobs(position: dict, best: Step, epsilon: float, step: int) -> None:
    ours = sorted((entry.logprob for entry in position.values() if entry.rank <= TOP), reverse=True)
    pairs = list(zip(ours, (logprob for _, logprob in best), strict=True))
    # And token by token, where both have it; around the fifth place they may differ.
    pairs += [(position[token].logprob, logprob) for token, logprob in best if token in position]
    off = max(abs(a - b) for a, b in pairs)
    assert off <= epsilon, f"step {step}: log-probabilities are off by {off:.2e}, more than {epsilon:.0e}"


class SameTokens:
    """The rule for one model folder. ``way`` is "greedy" or "follow"; prompts are token ids."""

    def __init__(self, folder: Path, epsilon: float, cache: Path, way: str = "greedy", steps: int = STEPS):
        self.folder, self.epsilon, self.way, self.steps = folder, epsilon, way, steps
        self.cache = cache / "same_tokens"
        self._references: dict[str, list[Step]] = {}

    def prompts(self, llm: LLM, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
        """Prompts of these lengths, each from another place of the text."""
        ids = llm.tokenizer.encode(TEXT, add_special_tokens=False)
        starts = [length % 50 for length in lengths]
        assert len(ids) >= max(map(sum, zip(starts, lengths, strict=True))), "the text is too short"
        return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def run(self, llm: LLM, prompts: list[list[int]], together: bool = True, steps: int | None = None) -> Score:
        """Generate, all prompts in one call or one by one, and compare. ``steps``: fewer than the rule has."""
        steps = steps or self.steps
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, logprobs=TOP)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        if together:
            outputs = llm.generate(asked, params)
        else:
            outputs = [output for prompt in asked for output in llm.generate(prompt, params)]
        score = Score(0, 0)
        for prompt, output in zip(prompts, outputs, strict=True):
            sample = output.outputs[0]
            assert len(sample.token_ids) == steps
            try:
                score += compare(sample, self.reference(prompt, sample.token_ids), self.epsilon)
            except AssertionError as error:
                raise AssertionError(f"prompt of {len(prompt)} tokens, {error}") from None
        return score

    def reference(self, prompt: list[int], output: list[int]) -> list[Step]:
        """transformers' five best tokens at every step."""
        what = [self.weights_hash, self.way, prompt, self.steps if self.way == "greedy" else output]
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        if key not in self._references:
            path = self.cache / f"{key}.json"
            if not path.exists():
                steps = self._greedy(prompt) if self.way == "greedy" else self._follow(prompt, output)
                self.cache.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(steps))
                partial.replace(path)
            self._references[key] = [[tuple(entry) for entry in step] for step in json.loads(path.read_text())]
        return self._references[key][: len(output)]

    @cached_property
    def weights_hash(self) -> str:
        digest = hashlib.sha256(transformers.__version__.encode())
        for name in ("config.json", "model.safetensors"):
            with open(self.folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def model(self):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return model.eval()

    @torch.inference_mode()
    def _greedy(self, prompt: list[int]) -> list[Step]:
        steps, past, new = [], None, prompt
        for _ in range(self.steps):
            result = self.model(torch.tensor([new]), past_key_values=past, use_cache=True, logits_to_keep=1)
            past = result.past_key_values
            steps += best_of(result.logits[0])
            new = [steps[-1][0][0]]
        return steps

    @torch.inference_mode()
    def _follow(self, prompt: list[int], output: list[int]) -> list[Step]:
        ids = torch.tensor([prompt + output[:-1]])
        return best_of(self.model(ids, use_cache=False, logits_to_keep=len(output)).logits[0])


def best_of(logits: torch.Tensor) -> list[Step]:
    """The five best of every row."""
    values, ids = logits.log_softmax(-1).topk(TOP)
    assert not math.isnan(values.sum())
    return [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
