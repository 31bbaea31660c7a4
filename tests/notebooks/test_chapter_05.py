"""What chapter 05's cells lean on: the tree to read, the widget, the milestone, numbers of the quiz."""

import itertools
import json
import random
from pathlib import Path

import pytest

from minillm import LLM, EngineConfig, SamplingParams
from minillm.bench.sharing import shared_prefix, sharing_rows
from minillm.core import parts
from minillm.core.workloads import few_shot
from minillm.course import mine, quiz
from minillm.course.radix_tree import (
    MOST_ACTIONS,
    ORDERS,
    PRESETS,
    TWO_PAIRS,
    preset_rows,
    radix_tree_widget,
    replay,
    step_rows,
    tree_svg,
    tree_text,
)
from minillm.memory import prefix_tree
from minillm.memory.block_pool import BlockPool
from minillm.memory.radix_cache import RadixCache
from minillm.simulator import prefixes

DATA = Path(__file__).parents[2] / "figures" / "data"

# -- the widget --------------------------------------------------------------------------------------------------------


def test_presets_answer_the_tasks():
    rows = {row[""]: row for row in preset_rows()}
    assert len(rows) == len(PRESETS)
    assert [rows[name]["edges"] for name in ("one that parts", "one that goes on", "its beginning")] == [3, 2, 2]
    assert rows["its beginning"]["words kept"] == rows["one prompt"]["words kept"] == 4, "no word more"
    assert replay("run you are a cat, ask you are the dog, evict 9")[-1].evicted == 2
    assert rows["two pairs, room 4"]["hit rate"] == "0%" and rows["by prefix, room 4"]["hit rate"] == "38%"
    rates = {room: [replay(TWO_PAIRS, room, order)[-1].hit_rate for order in ORDERS] for room in range(4, 12)}
    assert [room for room, (typed, by_prefix) in rates.items() if typed == by_prefix] == list(range(7, 12))


def test_an_edge_splits_where_prompts_part_and_locks_reach_the_root():
    (one, two, three) = replay("run a b c d, ask a b e f, end a b c d")
    assert tree_text(one) == "a b c d  locked ×1"
    assert tree_text(two) == "a b  locked ×1\n    c d  locked ×1\n    e f  goes first"
    assert tree_text(three) == "a b\n    c d\n    e f  goes first"
    assert (two.found, two.words, two.kept, two.hit_rate) == (2, 4, 6, 2 / 8)
    assert [row["found"] for row in step_rows([one, two, three])] == ["0 of 4", "2 of 4", ""]
    svg = tree_svg(two)
    assert svg.count("<text") == 6 + 3 and "3 edges that keeps 6 words" in svg


def test_eviction_takes_idle_leaves_and_no_more_than_needed():
    last = replay("ask a b c 1, ask x y z, evict 1", room=8)[-1]
    assert tree_text(last) == "a b c  goes first\nx y z"
    assert replay("run a b c d, ask x y z, evict 9", room=8)[-1].evicted == 3
    with pytest.raises(ValueError, match="needs 4 words more; free: 1, idle: 0"):
        replay("run a b c, run w x y z", room=4)


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ("sing a b", "is no action"),
        ("ask", "is no action"),
        ("evict some", "is no number of words"),
        ("end a b", "does not run"),
        (", ".join(["ask a"] * (MOST_ACTIONS + 1)), "25 actions; 24 at most"),
        ("ask " + "a " * 13, "a prompt of 13 words"),
    ],
)
def test_what_cannot_be_done_is_refused(actions, said):
    with pytest.raises(ValueError, match=said):
        replay(actions)


def test_shell_shows_the_tree_and_its_refusals():
    panel = radix_tree_widget()
    assert ">0%<" in panel.view.value and "edges: 1" in panel.view.value
    panel.controls["actions"].value = TWO_PAIRS
    panel.controls["room"].value = 4
    assert ">0%<" in panel.view.value
    panel.controls["order"].value = ORDERS[1]
    assert "38%" in panel.view.value
    evict, undo = panel.children[0].children[-2:]
    evict.click()
    assert panel.controls["actions"].value.endswith("evict 1")
    undo.click()
    assert panel.controls["actions"].value == TWO_PAIRS
    panel.controls["actions"].value = "ask a b c d e"
    assert "Not possible:" in panel.view.value and "needs 5 words more" in panel.view.value
    panel.controls["actions"].value = ""
    assert "The tree is empty" in panel.view.value


# -- the tree to read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_to_read_is_the_engines(seed):
    """Asks, locks and evictions: the same tokens are found, the same are let go."""
    rng, clock, pool = random.Random(seed), itertools.count(1), BlockPool(400)
    cache, root, running = RadixCache(pool, 1), prefix_tree.TreeNode(), []
    for _ in range(120):
        prompt = tuple(rng.choices("abc", k=rng.randint(1, 7)))
        match = cache.match(prompt)
        assert prefix_tree.match(root, prompt)[1] == match.num_tokens
        rows = pool.allocate(len(prompt) - match.num_tokens)
        node = cache.insert(prompt, [*match.blocks, *((row,) for row in rows)])
        pool.release(rows)
        cache.hold(node)
        twin = prefix_tree.insert(root, prompt, next(clock))
        prefix_tree.lock(twin)
        running.append((node, twin))
        while running and rng.random() < 0.6:
            node, twin = running.pop(rng.randrange(len(running)))
            cache.unlock(node)
            prefix_tree.lock(twin, -1)
            now = next(clock)
            for each in prefix_tree.path(twin):
                each.last_use = now
        if rng.random() < 0.1:
            want = rng.randint(1, 12)
            assert cache.evict(want) == prefix_tree.evict(root, want)
        assert cache.check_integrity()
        assert cache.num_tokens == sum(len(node.tokens) for node in prefix_tree.nodes(root))


def test_a_look_up_finds_what_comparing_with_all_finds():
    rng, root, kept = random.Random(1), prefix_tree.TreeNode(), []
    for _ in range(500):
        prompt = "".join(rng.choices("ab", k=rng.randint(1, 10)))
        found, _ = prefix_tree.plain_find(kept, prompt)
        assert prefix_tree.match(root, prompt)[1] == found
        prefix_tree.insert(root, prompt)
        kept.append(prompt)
    assert prefix_tree.plain_find([], "ab") == (0, 0)
    common = prefix_tree.in_common
    assert common("abcd", "abxd") == 2 and common("ab", "abc") == 2 and common("", "a") == 0


def test_drawing_shows_edges_locks_and_depth():
    root = prefix_tree.TreeNode()
    prefix_tree.lock(prefix_tree.insert(root, "abc"))
    prefix_tree.insert(root, "abd")
    assert prefix_tree.draw(root) == "ab  (locked ×1)\n    c  (locked ×1)\n    d"


# -- the engine --------------------------------------------------------------------------------------------------------


def test_of_32_that_come_together_31_find_the_prefix():
    """Counters alone, on tiny; the stored figure is of a real model."""
    before, after = sharing_rows("tiny", repeats=1, dtype="float32", max_model_len=1024)
    assert before["tokens_generated"] == after["tokens_generated"] == sum(r.output_len for r in shared_prefix(2048))
    assert after["tokens_cached"] == 31 * 512 and before["tokens_cached"] == 0
    assert before["tokens_computed"] - after["tokens_computed"] == 31 * 512
    wide = sharing_rows("tiny", 1, "float32", (5,), max_model_len=1024, max_num_batched_tokens=2048)
    assert wide[0]["tokens_cached"] == 28 * 512, "four begin in one pass, and each computes the prefix"


def test_stored_figure_has_the_counters_of_its_workload():
    stored = json.loads((DATA / "prefix_sharing.json").read_text(encoding="utf-8"))
    before, after = stored["rows"]
    assert (before["chapter"], after["chapter"]) == (3, 5) and before["ratio"] == 1
    assert after["tokens_cached"] == 31 * 512 == before["tokens_computed"] - after["tokens_computed"]
    assert after["ratio"] == pytest.approx(after["tokens_per_second"] / before["tokens_per_second"])
    assert after["ratio"] > 1.5 and stored["machine"]["date"]


def test_a_cache_of_ones_own_runs_where_the_config_wants_one():
    made = []

    def factory(pool, block_size):
        made.append(RadixCache(pool, block_size, page_size=block_size))
        return made[-1]

    prompt = {"prompt_token_ids": list(range(5, 50))}
    params = SamplingParams(temperature=0, max_tokens=4)
    config = EngineConfig.at_chapter(5, dtype="float32")
    with LLM("tiny", config=config, prefix_cache=factory) as llm:
        cold, warm = (llm.generate(prompt, params)[0] for _ in range(2))
        assert made == [llm.engine.kv.cache] and warm.num_cached_tokens == 32
        assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    with LLM("tiny", config=config, parts={"prefix_cache": factory}, prefix_cache=RadixCache) as llm:
        assert type(llm.engine.kv.cache) is RadixCache and len(made) == 1, "named by itself it goes first"
    with LLM("tiny", config=config.override(prefix_cache="none"), prefix_cache=factory) as llm:
        assert llm.engine.kv.cache is None and len(made) == 1


def test_milestone_runs_ours_and_yours(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MINE", tmp_path)
    (ours,) = mine.the_core()
    assert ours["engine"] == "ours" and int(ours["found in the cache"].replace(",", "")) > 0
    (tmp_path / "05.py").write_text(
        "from minillm.memory.block_hash import BlockHashCache\nPARTS = {'prefix_cache': BlockHashCache}\n"
    )
    _, yours = mine.the_core()
    assert (yours["engine"], yours["your parts"]) == ("yours", "prefix_cache")
    (tmp_path / "05.py").write_text(
        "from minillm.scheduling.scheduler import Scheduler\n"
        "class Wrong(Scheduler):\n"
        "    def update(self, batch, output):\n"
        "        output.sampled = {i: [7 for _ in tokens] for i, tokens in output.sampled.items()}\n"
        "        return super().update(batch, output)\n"
        "PARTS = {'scheduler': Wrong}\n"
    )
    with pytest.raises(AssertionError, match="your engine writes other tokens"):
        mine.the_core()


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_quizs_numbers_are_what_trees_do():
    rng = random.Random(3)
    for _ in range(50):
        prompts = ["".join(rng.choices("abc", k=rng.randint(1, 8))) for _ in range(9)]
        assert quiz.best_hit_rate(prompts) / 100 == pytest.approx(prefixes.optimal_hit_rate(prompts, False))
    system = list(range(1000))
    chats = [[*system, 2000 + i, 1, 2] for i in range(9)]
    hashed, tree = (prefixes.replay(chats, kind, block_size=16).tokens_computed for kind in ("block_hash", "radix"))
    assert (hashed - tree) / 8 == quiz.tokens_beyond_blocks(1000, 16) == 8


def test_the_chapters_first_number():
    prompts = prefixes.prompts_of(few_shot())
    beginnings = [tuple(p[: i + 1]) for p in prompts for i in range(len(p))]
    again = 1 - len(set(beginnings)) / len(beginnings)
    assert again == pytest.approx(prefixes.optimal_hit_rate(prompts, False)) and f"{again:.0%}" == "83%"
