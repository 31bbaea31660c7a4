import pytest
import torch

from minillm import LLM, EngineConfig
from minillm.core.outputs import CompletionOutput, Logprob
from minillm.models.fetch import resolve
from minillm.models.layers.rotary import RotaryEmbedding
from minillm.models.llama import LlamaForCausalLM
from tests.engine.same_tokens import SameTokens, Score, compare
from tests.support import distinct_chapters

EMBEDDED_EPSILON, SMOLLM2_EPSILON = 1e-4, 1e-3
CHAPTERS = distinct_chapters()
# Many prompts and few steps: where the reference itself is undecided, the rest of a prompt's steps is lost.
EMBEDDED_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 33, 48, 64, 90, 129, 150, 200, 257, 300, 350, 400)
EMBEDDED_STEPS = 70


def chapter_llm(model, chapter: int) -> LLM:
    # Few seats, so that a contiguous cache is no larger than the prompts need.
    return LLM(str(model), config=EngineConfig.at_chapter(chapter), dtype="float32", max_num_seqs=16)


# -- the embedded model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rule(embedded, cache_folder) -> SameTokens:
    return SameTokens(embedded("tiny"), EMBEDDED_EPSILON, cache_folder, steps=EMBEDDED_STEPS)


@pytest.fixture(scope="module", params=CHAPTERS, ids=lambda n: f"chapter {n}")
def tiny(rule, request):
    with chapter_llm(rule.folder, request.param) as llm:
        yield llm


@pytest.mark.parametrize("together", [False, True], ids=["alone", "batched"])
def test_the_embedded_model_gives_the_same_tokens(rule, tiny, together):
    rule.run(tiny, rule.prompts(tiny, EMBEDDED_LENGTHS), together).assert_enough()


def test_long_prompts_up_to_the_end_of_the_context(rule, tiny):
    """Too few steps for the rule's count: what is compared must still agree."""
    longest = tiny.engine.config.max_model_len - rule.steps
    ids = (rule.prompts(tiny, (300,))[0] * 10)[:longest]
    assert rule.run(tiny, [ids, ids[:-1], ids[:1]]).compared > 0


class Faults:
    """Small mistakes that a comparison of texts might miss."""

    @staticmethod
    def decode_positions_one_too_far(monkeypatch):
        tables = RotaryEmbedding.tables

        def shifted(self, positions, dtype):
            return tables(self, positions + (len(positions) == 1), dtype)

        monkeypatch.setattr(RotaryEmbedding, "tables", shifted)

    @staticmethod
    def half_the_rotation(monkeypatch):
        tables = RotaryEmbedding.tables
        monkeypatch.setattr(RotaryEmbedding, "tables", lambda self, p, dtype: tables(self, p // 2, dtype))

    @staticmethod
    def logits_a_little_off(monkeypatch):
        logits = LlamaForCausalLM.compute_logits
        monkeypatch.setattr(LlamaForCausalLM, "compute_logits", lambda self, h: logits(self, h) * 1.0005)

    @staticmethod
    def a_token_too_few_in_the_cache(monkeypatch):
        """Decode does not see the first row."""
        from minillm.compute.attention import naive

        attend = naive.attend_one

        def forgetful(q, k, v, *rest):
            return attend(q, k[1:], v[1:], *rest) if len(q) == 1 < len(k) else attend(q, k, v, *rest)

        monkeypatch.setattr(naive, "attend_one", forgetful)


FAULTS = [getattr(Faults, name) for name in vars(Faults) if not name.startswith("_")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_break_the_rule(rule, monkeypatch, fault):
    with chapter_llm(rule.folder, 0) as llm:
        prompts = rule.prompts(llm, (64,))
        rule.run(llm, prompts)
        fault(monkeypatch)
        with pytest.raises(AssertionError, match="prompt of 64 tokens, step"):
            rule.run(llm, prompts)


def test_both_ways_to_the_reference_agree(rule, cache_folder):
    """Where the reference reads what it generated itself, each step has the same five."""
    follow = SameTokens(rule.folder, EMBEDDED_EPSILON, cache_folder, "follow", rule.steps)
    with chapter_llm(rule.folder, 0) as llm:
        (prompt,) = rule.prompts(llm, (33,))
    greedy = rule.reference(prompt, [0] * rule.steps)  # what it said itself, whatever the output
    ids = [step[0][0] for step in greedy]
    for a, b in zip(greedy, follow.reference(prompt, ids), strict=True):
        assert [token for token, _ in a][:1] == [token for token, _ in b][:1]
        torch.testing.assert_close([x for _, x in a], [x for _, x in b], rtol=0, atol=2e-5)


# -- the real model -------------------------------------------------------------------------------------------------


@pytest.mark.smollm2
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chapter", [pytest.param(n, marks=[pytest.mark.nightly] if n != CHAPTERS[-1] else []) for n in CHAPTERS]
)
def test_smollm2_gives_the_same_tokens(cache_folder, chapter):
    rule = SameTokens(resolve("smollm2"), SMOLLM2_EPSILON, cache_folder, "follow")
    with chapter_llm(rule.folder, chapter) as llm:
        prompts = rule.prompts(llm)
        rule.run(llm, prompts, together=True).assert_enough()
        # Alone, a few: every pass reads all the weights for one token.
        assert rule.run(llm, [prompts[0], prompts[5]], together=False, steps=40).compared > 60


# -- the comparison itself ------------------------------------------------------------------------------------------

BEST = [(7, -0.1), (8, -3.0), (9, -4.0), (10, -5.0), (11, -6.0)]
TIED = [(7, -0.7), (8, -0.7000001), (9, -4.0), (10, -5.0), (11, -6.0)]


def said(tokens: list[int], reference: list, shift: float = 0.0) -> CompletionOutput:
    """An output whose log-probabilities are the reference's, moved by ``shift``."""
    positions = [
        {token: Logprob(logprob + shift, rank + 1, None) for rank, (token, logprob) in enumerate(best)}
        for best in reference
    ]
    return CompletionOutput(0, token_ids=tokens, logprobs=positions)


def test_equal_steps_are_all_compared():
    assert compare(said([7, 7, 7], [BEST] * 3), [BEST] * 3, 1e-4) == Score(3, 3)
    assert compare(said([7], [BEST], shift=0.9e-4), [BEST], 1e-4) == Score(1, 1)


def test_logprobs_beyond_epsilon_fail():
    with pytest.raises(AssertionError, match=r"step 0: log-probabilities are off by 1\.10e-04"):
        compare(said([7], [BEST], shift=1.1e-4), [BEST], 1e-4)


def test_another_token_at_a_clear_margin_fails():
    with pytest.raises(AssertionError, match="step 1: token 8"):
        compare(said([7, 8], [BEST] * 2), [BEST] * 2, 1e-4)


def test_what_follows_a_near_tie_is_cut_away():
    reference = [BEST, TIED, BEST, BEST]
    assert compare(said([7, 7, 7, 7], reference), reference, 1e-4) == Score(1, 4)
    assert compare(said([7, 8, 9, 9], reference), reference, 1e-4) == Score(1, 4)
    # While ids agree, log-probabilities count even there.
    output = said([7, 7, 7, 7], reference)
    output.logprobs[3] = said([7], [BEST], shift=1.0).logprobs[0]
    with pytest.raises(AssertionError, match="step 3"):
        compare(output, reference, 1e-4)


def test_a_swap_around_the_fifth_place_is_no_fault():
    ours = [*BEST[:4], (12, -6.00005)]
    assert compare(said([7], [ours]), [BEST], 1e-4) == Score(1, 1)


def test_too_few_or_too_much_cut_does_not_count():
    Score(1000, 1111).assert_enough()
    with pytest.raises(AssertionError, match="only 999"):
        Score(999, 999).assert_enough()
    with pytest.raises(AssertionError, match="120 of 1120"):
        Score(1000, 1120).assert_enough()
